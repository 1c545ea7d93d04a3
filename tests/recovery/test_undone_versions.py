"""A start moves the offsets of a Delta source behind a roll-back of its table; tests/spark has real tables."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.errors import RowsAtRiskError
from dagster_ckpt.recovery import source_check
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.sources import Leaf
from tests.sinks.test_reads_of_tables import ID, DeltaTable
from tests.support.stream_graph import place

LEAF = Leaf("a leaf", "0", 0, "0", is_again=False)


class Reader:
    """A query that reads a table: batch 0 read version 0, batch 1 version 1, which are two files each."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.table = DeltaTable(root / "table")
        self.live = LiveDirectory(str(root / "live"))
        self.index: int | None = 1
        patch.setattr(source_check, "streaming_leaves", lambda _writer: ["a leaf"])
        patch.setattr(source_check, "sources_in_entry", lambda _, read: [(LEAF, *each) for each in read.items()])
        patch.setattr(source_check, "_appending_table", lambda _leaf: str(self.table.folder))
        patch.setattr(source_check, "session_of", lambda _writer: None)
        patch.setattr(source_check, "last_of_read", lambda *_: self.index)
        for version in range(5):
            self.table.batch(2)
            if version < 2:
                self.plan(version, version + 1)
                place(root / "live" / "commits" / str(version), "v1\n{}")

    def plan(self, batch: int, version: int) -> None:
        offset = {"sourceVersion": 1, "reservoirId": ID, "reservoirVersion": version, "index": -1}
        lines = ["v1", "{}", json.dumps({**offset, "isStartingVersion": False})]
        place(Path(self.live.url) / "offsets" / str(batch), "\n".join(lines))

    @property
    def offsets(self) -> list[tuple[int, int, bool]]:
        entries = sorted((Path(self.live.url) / "offsets").glob("[0-9]*"))
        found: list[dict[str, Any]] = [json.loads(each.read_text().splitlines()[2]) for each in entries]
        return [(each["reservoirVersion"], each["index"], each["isStartingVersion"]) for each in found]

    def start(self, *, accept_loss: bool = False) -> list[str]:
        writer: Any = None
        return source_check.continue_behind_roll_backs("daily", self.live, writer, nullcontext, accept_loss=accept_loss)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    return Reader(tmp_path, monkeypatch)


UNMOVED = [(1, -1, False), (2, -1, False)]


def test_both_offsets_that_spark_asks_for_are_moved(reader: Reader) -> None:
    reader.table.roll_back(1)

    (message,) = reader.start()

    # Batch 1 has read all that is left, batch 0 two files of it.
    assert reader.offsets == [(5, 1, True), (6, -1, False)]
    assert "was rolled back in version 5" in message
    assert (reader.start(), reader.offsets) == ([], [(5, 1, True), (6, -1, False)])


def test_start_that_died_between_the_two_offsets_is_repeated(reader: Reader) -> None:
    reader.table.roll_back(1)
    reader.start()
    reader.plan(0, 1)

    reader.start()

    assert reader.offsets == [(5, 1, True), (6, -1, False)]


@pytest.mark.parametrize("to", [None, 0])
def test_source_without_undone_versions_ahead_or_with_undone_rows_stays(reader: Reader, to: int | None) -> None:
    if to is not None:
        reader.table.roll_back(to)

    assert (reader.start(), reader.offsets) == ([], UNMOVED)


def test_planned_batch_refuses_the_start_and_nothing_is_changed(reader: Reader) -> None:
    reader.plan(2, 3)
    reader.table.roll_back(2)

    with pytest.raises(RowsAtRiskError, match="batch 2 is planned; start with start_from=batch-1"):
        reader.start()
    assert len(reader.start(accept_loss=True)) == 2
    assert reader.offsets == [*UNMOVED, (3, -1, False)]


def test_files_in_another_order_refuse_the_start_and_nothing_is_changed(reader: Reader) -> None:
    reader.table.roll_back(1)
    reader.index = None

    with pytest.raises(RowsAtRiskError, match="not the newest ones of the table"):
        reader.start()
    assert reader.offsets == UNMOVED
