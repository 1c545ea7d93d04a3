"""What a Delta source would read next, and whether its table still has it; tests/sinks shows it with real tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from dagster_ckpt.errors import StateRewriteError
from dagster_ckpt.spark.query.table_sources import DeltaOffset, delta_beginning, delta_offset, gone

ID = "2c4d"


def commit(*added: str, removed: Sequence[str] = (), table_id: str | None = None, changes: bool = True) -> str:
    actions: list[dict[str, Any]] = [{"commitInfo": {}}]
    actions += [{"metaData": {"id": table_id}}] if table_id is not None else []
    actions += [{"add": {"path": path, "dataChange": changes}} for path in added]
    actions += [{"remove": {"path": path, "dataChange": changes}} for path in removed]
    return "\n".join(map(json.dumps, actions)) + "\n"


@dataclass
class Files:
    """A table with these commits, and these data files deleted."""

    commits: dict[int, str]
    checkpoints: tuple[int, ...] = ()
    deleted: tuple[str, ...] = ()
    asked: list[str] = field(default_factory=list)

    def log(self) -> list[str]:
        checkpoints = [f"{version:020}.checkpoint.parquet" for version in self.checkpoints]
        return [*(f"{version:020}.json" for version in self.commits), *checkpoints, "_last_checkpoint", ".0.json.crc"]

    def read(self, name: str) -> str:
        return self.commits[int(name.removesuffix(".json"))]

    def exists(self, path: str) -> bool:
        self.asked.append(path)
        return path not in self.deleted


def whole(newest: int) -> dict[int, str]:
    """Version 0 creates the table, each later one adds a file."""
    return {0: commit(table_id=ID)} | {version: commit(f"f{version}") for version in range(1, newest + 1)}


def without(versions: Sequence[int], commits: dict[int, str]) -> dict[int, str]:
    return {version: text for version, text in commits.items() if version not in versions}


OPTIMIZED = whole(4) | {5: commit("f5", removed=["f1", "f2", "f3", "f4"], changes=False)}
CASES: dict[str, tuple[DeltaOffset, Files, str]] = {
    "all there": (DeltaOffset(ID, 2, -1, False), Files(whole(4)), ""),
    "at the end": (DeltaOffset(ID, 5, -100, False), Files(whole(4)), ""),
    "the log begins where it continues": (DeltaOffset(ID, 3, -1, False), Files(without([0, 1, 2], whole(4)), (3,)), ""),
    "the log begins later": (
        DeltaOffset(ID, 2, -1, False),
        Files(without([0, 1, 2], whole(4)), (3,)),
        "reads from version 2 on, and the log begins at 3: versions 2 to 2 are gone",
    ),
    "no log": (DeltaOffset(ID, 2, -1, False), Files({}), "no longer exists"),
    "an older copy": (
        DeltaOffset(ID, 9, -1, False),
        Files(whole(4)),
        "ends at version 4, and the query reads from 9 on",
    ),
    "another table": (DeltaOffset("other", 2, -1, False), Files(whole(4)), "is not the one that the query has read"),
    "replaced later": (
        DeltaOffset(ID, 2, -1, False),
        Files(whole(2) | {3: commit(table_id="new")}),
        "is not the one that the query has read",
    ),
    "replaced before the query began": (
        DeltaOffset(ID, 3, -1, False),
        Files({0: commit(table_id="old"), 1: commit("a", table_id=ID), 2: commit("b"), 3: commit("c")}),
        "",
    ),
    "created again with more versions": (
        DeltaOffset(ID, 3, -1, False),
        Files({0: commit(table_id="old"), 1: commit("a", table_id="new"), 2: commit("b"), 3: commit("c")}),
        "is not the one that the query has read",
    ),
    "vacuumed after a commit that is far ahead": (
        DeltaOffset(ID, 2, -1, False),
        Files(whole(299) | {300: commit("all", removed=["f2", "f3"], changes=False)}, deleted=("f2", "f3")),
        "2 data files that it would read were deleted (VACUUM), such as f2, f3",
    ),
    "optimized": (DeltaOffset(ID, 2, -1, False), Files(OPTIMIZED), ""),
    "optimized and vacuumed": (
        DeltaOffset(ID, 2, -1, False),
        Files(OPTIMIZED, deleted=("f1", "f2", "f3", "f4")),
        "3 data files that it would read were deleted (VACUUM), such as f2, f3, f4",
    ),
    "vacuumed, and read already": (
        DeltaOffset(ID, 5, -1, False),
        Files(OPTIMIZED, deleted=("f1", "f2", "f3", "f4")),
        "",
    ),
    "read in part": (
        DeltaOffset(ID, 1, 0, False),
        Files({0: commit(table_id=ID), 1: commit("a", "b"), 2: commit(removed=["a", "b"])}, deleted=("a",)),
        "",
    ),
    "the other part is deleted": (
        DeltaOffset(ID, 1, 0, False),
        Files({0: commit(table_id=ID), 1: commit("a", "b"), 2: commit(removed=["a", "b"])}, deleted=("b",)),
        "1 data files that it would read were deleted (VACUUM), such as b",
    ),
    "the table as it was at a checkpoint": (
        DeltaOffset(ID, 3, 7, True),
        Files(without([0, 1], whole(4)), (2,)),
        "",
    ),
    "the table as it was, optimized": (DeltaOffset(ID, 3, -1, True), Files(OPTIMIZED), ""),
    "the table as it was, optimized and vacuumed": (
        DeltaOffset(ID, 3, -1, True),
        Files(OPTIMIZED, deleted=("f1", "f2", "f3", "f4")),
        "4 data files that it would read were deleted (VACUUM), such as",
    ),
    "the table as it was, read in part": (
        DeltaOffset(ID, 3, 1, True),
        Files(OPTIMIZED, deleted=("f1", "f2")),
        "",
    ),
    "the table as it was after it was optimized": (
        DeltaOffset(ID, 5, -1, True),
        Files(OPTIMIZED, deleted=("f1", "f2", "f3", "f4")),
        "",
    ),
    "the table as it was, which cannot be told": (
        DeltaOffset(ID, 3, 7, True),
        Files(without([0, 1, 2, 3], whole(5)), (4,)),
        "reads from version 3 on, and the log begins at 4",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_says_what_is_gone(case: str) -> None:
    offset, files, expected = CASES[case]

    found = list(gone("/data/orders", offset, files))

    assert len(found) == bool(expected)
    assert expected in "".join(found)


def test_only_files_that_a_later_commit_removed_are_looked_for() -> None:
    files = Files(OPTIMIZED | {6: commit("f6")})

    assert list(gone("/data/orders", DeltaOffset(ID, 2, -1, False), files)) == []
    assert files.asked == ["f2", "f3", "f4"]


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        (
            '{"sourceVersion":1,"reservoirId":"2c4d","reservoirVersion":3,"index":-1,"isStartingVersion":false}',
            DeltaOffset(ID, 3, -1, False),
        ),
        ('{"orders":{"0":12}}', None),
        ('{"logOffset":3}', None),
        ("12", None),
        ("-", None),
        (None, None),
    ],
)
def test_the_offset_of_a_delta_source_is_known(text: str | None, offset: DeltaOffset | None) -> None:
    assert delta_offset(text) == offset


def test_an_offset_is_written_as_it_is_read() -> None:
    assert delta_offset(DeltaOffset(ID, 3, 7, True).as_text()) == DeltaOffset(ID, 3, 7, True)


END = DeltaOffset(ID, 7, 2, False)


@pytest.mark.parametrize(
    ("options", "end", "begins"),
    [
        ({}, END, DeltaOffset(ID, 6, -1, True)),
        ({"skipchangecommits": "false"}, END, DeltaOffset(ID, 6, -1, True)),
        ({}, DeltaOffset(ID, 7, 2, True), DeltaOffset(ID, 7, -1, True)),
        ({"startingversion": "3", "skipchangecommits": "true"}, END, DeltaOffset(ID, 3, -1, False)),
    ],
)
def test_a_table_is_read_once_more_from_where_its_source_begins(
    options: dict[str, str], end: DeltaOffset, begins: DeltaOffset
) -> None:
    assert delta_beginning(options, end) == begins


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"startingversion": "latest"}, "with startingVersion=latest it is not recorded"),
        ({"startingtimestamp": "2026-01-01"}, "with startingTimestamp it is not recorded"),
        ({"startingversion": "8"}, "startingVersion is 8, and it has read only up to version 7"),
        ({"skipchangecommits": "True"}, "with skipChangeCommits it may have read other rows"),
        ({"readchangefeed": "true"}, "with readChangeFeed it may have read other rows"),
    ],
)
def test_a_table_is_not_read_once_more_where_other_rows_may_come(options: dict[str, str], why: str) -> None:
    with pytest.raises(StateRewriteError, match=why):
        delta_beginning(options, END)
