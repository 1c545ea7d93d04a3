"""How far a source has read a table, and where it continues behind a roll-back: random lives against a plain model."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.sinks.delta import DeltaMerge
from dagster_ckpt.sinks.delta_log import DeltaLog
from dagster_ckpt.sinks.delta_roll_back import ROLL_BACK_ID
from dagster_ckpt.sinks.iceberg_history import IcebergHistory, IcebergSnapshot
from dagster_ckpt.sinks.sink import ReadOfSink, RollBack, SinkEffect
from dagster_ckpt.sinks.table import Step, verdict
from dagster_ckpt.spark.query.table_sources import LOG, DeltaOffset, IcebergOffset
from tests.support.thorough import either

ID, OWN = "2c4d", "query"
LIVES = either(quick=60, thorough=600)


@dataclass
class Version:
    """Files as they were added, and the batches that readers see."""

    files: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    path: tuple[int, ...] = ()


@dataclass
class DeltaTable:
    """A table that a stream appends to, others optimize, and roll-backs take back."""

    folder: Path
    versions: list[Version] = field(default_factory=list)
    roll_backs: list[int] = field(default_factory=list)

    @property
    def now(self) -> Version:
        return self.versions[-1] if self.versions else Version()

    def batch(self, files: int) -> None:
        number = len(self.versions)
        batch = max(self.now.batches, default=-1) + 1
        added = tuple(f"f{number}-{each}" for each in range(files))
        after = Version((*self.now.files, *added), (*self.now.batches, batch), (*self.now.path, number))
        txn = {"txn": {"appId": OWN, "version": batch}}
        self._commit(after, txn, *({"add": {"path": each, "dataChange": True}} for each in added))

    def fence(self) -> None:
        """A commit without rows."""
        after = Version(self.now.files, self.now.batches, (*self.now.path, len(self.versions)))
        self._commit(after, {"txn": {"appId": ROLL_BACK_ID, "version": 1}})

    def roll_back(self, to: int, *, by_a_person: bool = False) -> None:
        """-1 is before the first version."""
        number = len(self.versions)
        back = self.versions[to] if to >= 0 else Version()
        self.roll_backs.append(number)
        mark = [] if by_a_person else [{"txn": {"appId": ROLL_BACK_ID, "version": number}}]
        info = (
            {"operation": "RESTORE", "operationParameters": {"version": to}} if to >= 0 else {"operation": "TRUNCATE"}
        )
        removed = [{"remove": {"path": each, "dataChange": True}} for each in self.now.files if each not in back.files]
        after = Version(back.files, back.batches, (*back.path, number))
        self._commit(after, {"commitInfo": info}, *mark, *removed)

    def _commit(self, after: Version, *actions: object) -> None:
        log = self.folder / LOG
        log.mkdir(parents=True, exist_ok=True)
        number = len(self.versions)
        first = [{"metaData": {"id": ID}}] if number == 0 else []
        (log / f"{number:020}.json").write_text("\n".join(map(json.dumps, [*first, *actions])) + "\n")
        self.versions.append(after)

    def log(self) -> DeltaLog:
        return DeltaLog(open_file_io(str(self.folder)))


def life_of(folder: Path, seed: int) -> DeltaTable:
    chance = random.Random(seed)
    table = DeltaTable(folder)
    for _ in range(chance.randrange(1, 14)):
        kind = chance.choices(["batch", "empty batch", "fence", "roll back"], [6, 1, 1, 2])[0]
        if kind == "roll back" and table.versions:
            table.roll_back(chance.choice([*table.now.path[-4:], -1]))
        elif kind == "fence" and table.versions:
            table.fence()
        else:
            table.batch(0 if kind == "empty batch" else chance.randrange(1, 3))
    return table


def test_a_table_that_a_person_took_back_lacks_the_batch_until_the_advice_is_followed(tmp_path: Path) -> None:
    table = DeltaTable(tmp_path)
    for _ in range(4):
        table.batch(1)
    table.roll_back(1, by_a_person=True)
    to = RollBack(2, query_id=OWN)

    found = verdict(DeltaMerge("merged", str(tmp_path)).plan(to), to)
    assert (found.step, found.effect) == (Step.REFUSE, SinkEffect.LOSE)
    assert found.reason.startswith("Version 4 took the table back to before batch 2")
    assert found.advice.endswith(
        "TO VERSION AS OF 2. Then start again. To continue without them, start with accept_loss."
    )

    accepted = verdict(DeltaMerge("merged", str(tmp_path)).plan(to), replace(to, accepts_loss=True))
    assert accepted.step is Step.LEAVE

    table.roll_back(2, by_a_person=True)
    found = verdict(DeltaMerge("merged", str(tmp_path)).plan(to), to)
    assert (found.step, found.effect) == (Step.LEAVE, SinkEffect.EXACT)


@pytest.mark.parametrize("part", range(4))
def test_newest_batch_that_a_delta_source_has_read_is_found(tmp_path: Path, part: int) -> None:
    for seed in range(part, LIVES, 4):
        table = life_of(tmp_path / str(seed), seed)
        for read, then in enumerate(table.versions):
            found = table.log().read_up_to(
                DeltaOffset(ID, read + 1, -1, False), [OWN], skips_changes=False, rewound=True
            )

            lost = set(then.files) - set(table.now.files)
            undone = {each for each in then.path if any(file.startswith(f"f{each}-") for file in lost)}
            assert (found.why, found.undone) == ("", len(undone)), (seed, read)
            shown = [each for each in then.path if each in table.now.path]
            assert found.batch == max(table.versions[shown[-1]].batches if shown else (), default=None), (seed, read)


@pytest.mark.parametrize("part", range(4))
def test_delta_source_continues_behind_what_was_undone_before_it_was_read(tmp_path: Path, part: int) -> None:
    moved = 0
    for seed in range(part, LIVES, 4):
        table = life_of(tmp_path / str(seed), seed)
        for read, then in enumerate(table.versions):
            found = table.log().undone_ahead(DeltaOffset(ID, read + 1, -1, False))

            joined = max((each for each in then.path if each in table.now.path), default=-1)
            ahead = [each for each in table.roll_backs if each in table.now.path and each > joined]
            if not ahead or set(then.files) - set(table.now.files):
                assert found is None, (seed, read)
                continue
            moved += 1
            whole = table.versions[ahead[-1]].files
            assert found is not None
            assert found.roll_back == ahead[-1], (seed, read)
            assert (found.unread, found.obstacle) == (tuple(each for each in whole if each not in then.files), "")
    assert moved > LIVES / 4


def test_part_of_a_version_that_was_not_read_is_read_behind_the_roll_back(tmp_path: Path) -> None:
    table = DeltaTable(tmp_path)
    for files in (3, 2, 1):
        table.batch(files)
    table.roll_back(1)

    found = table.log().undone_ahead(DeltaOffset(ID, 0, 0, False))

    assert found is not None
    assert (found.roll_back, found.unread) == (3, ("f0-1", "f0-2", "f1-0", "f1-1"))


@pytest.mark.parametrize(
    ("action", "why"),
    [
        ({"remove": {"path": "f0-0", "dataChange": True}}, "version 1 changes or removes rows"),
        ({"metaData": {"id": ID}}, "version 1 changes or removes rows, or the schema"),
        ({"remove": {"path": "f0-0", "dataChange": False}}, ""),
    ],
)
def test_rows_that_others_have_changed_keep_a_source_where_it_is(tmp_path: Path, action: object, why: str) -> None:
    table = DeltaTable(tmp_path)
    table.batch(1)
    table._commit(Version(("f1-0",), (0,), (0, 1)), action)
    table.batch(1)
    table.roll_back(1)

    found = table.log().undone_ahead(DeltaOffset(ID, 1, -1, False))

    assert found is not None
    assert why in found.obstacle
    assert bool(why) == bool(found.obstacle)


def test_source_that_skips_changes_may_have_read_what_was_undone(tmp_path: Path) -> None:
    table = DeltaTable(tmp_path)
    for files in (1, 1):
        table.batch(files)
    table.roll_back(0)
    table.batch(1)
    offset = DeltaOffset(ID, 4, -1, False)

    assert "skips commits" in table.log().read_up_to(offset, [OWN], skips_changes=True, rewound=True).why
    assert table.log().read_up_to(offset, [OWN], skips_changes=True, rewound=False) == ReadOfSink(1)


def test_position_outside_the_log_is_unknown(tmp_path: Path) -> None:
    table = DeltaTable(tmp_path)
    for _ in range(3):
        table.batch(1)
    (tmp_path / LOG / f"{0:020}.json").unlink()
    (tmp_path / LOG / f"{1:020}.json").unlink()

    for version in (1, 9):
        assert (
            "not in the table's log"
            in table.log()
            .read_up_to(DeltaOffset(ID, version, -1, False), [OWN], skips_changes=False, rewound=False)
            .why
        )
    of_others = table.log().read_up_to(DeltaOffset(ID, 3, -1, False), ["other"], skips_changes=False, rewound=False)
    assert "begins later" in of_others.why


def snapshot(number: int, parent: int | None, batch: int | None) -> IcebergSnapshot:
    summary = {"operation": "append"}
    if batch is not None:
        summary |= {"spark.sql.streaming.queryId": OWN, "spark.sql.streaming.epochId": str(batch)}
    return IcebergSnapshot.model_validate(
        {"snapshot-id": number, "parent-snapshot-id": parent, "timestamp-ms": number, "summary": summary}
    )


# Batches 0 to 3; 2 and 3 were undone, and batch 2 written again. 6 is of another writer.
ICEBERG = IcebergHistory(
    6, [*(snapshot(each, each - 1 or None, each - 1) for each in range(1, 5)), snapshot(5, 2, 2), snapshot(6, 5, None)]
)


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        (IcebergOffset(-1, 0), ReadOfSink()),
        (IcebergOffset(1, 0, True), ReadOfSink()),
        (IcebergOffset(1, 1, True), ReadOfSink(0)),
        (IcebergOffset(2, 0), ReadOfSink(0)),
        (IcebergOffset(2, 1), ReadOfSink(1)),
        (IcebergOffset(4, 2), ReadOfSink(1, 2)),
        (IcebergOffset(3, 0), ReadOfSink(1)),
        (IcebergOffset(5, 1), ReadOfSink(2)),
        (IcebergOffset(6, 1), ReadOfSink(2)),
        (IcebergOffset(9, 1), ReadOfSink(why="the snapshot that it has read has expired, and the position is")),
    ],
)
def test_newest_batch_that_an_iceberg_source_has_read_is_found(offset: IcebergOffset, expected: ReadOfSink) -> None:
    assert ICEBERG.read_up_to(offset, [OWN]) == expected


def test_expired_snapshots_make_the_position_in_an_iceberg_table_unknown() -> None:
    history = IcebergHistory(6, [snapshot(6, 5, None)])

    assert "have expired" in history.read_up_to(IcebergOffset(6, 1), [OWN]).why
