"""Real Delta tables by MERGE, by name, and with features that change the log: each row is there once.

`make test` plays a few of the scenarios, `make test-all` a slice, `make test-tables` all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from dagster_ckpt.spark.versions import TableFormat
from tests.support.shop_tables import PLAY_S, play
from tests.support.table_jars import fetch_jars, needs_jar
from tests.support.thorough import either

Told = Callable[[str], dict[str, Any]]
SHOWN = {
    "merged": range(5),
    "merged, and killed before the commit": range(4),
    "upserted": range(5),
    "upserted, and killed before the commit": range(4),
    "written twice": range(5),
    "killed between two writes": range(5),
    "killed between two writes, and lost its directory": range(5),
    "to a named table": range(5),
    "to a table that the start creates": range(5),
    "mapped columns, deletion vectors, log checkpoints": range(5),
    "left to a person": range(3),
    "from a table": range(6),
    "from a named table": range(6),
}
# Also what the table then shows: that of the start before.
REFUSED = {
    "from a table whose log was cut": ("the log begins at", range(7)),
    "from a vacuumed table": ("were deleted (VACUUM)", range(5)),
    "from a re-created table": ("is not the one that the query has read", range(5)),
}
# Only the first write took effect.
SECOND_WRITES = {
    "written twice without a name": "has written in delta_transaction already",
    "written twice in one transaction": "writes more than once in one delta_transaction",
}
QUICK = ("upserted, and killed before the commit",)
SLICE = (
    *QUICK,
    "written twice in one transaction",
    "upserted",
    "to a table that the start creates",
    "from a named table",
)

pytestmark = [pytest.mark.spark, pytest.mark.timeout(PLAY_S), needs_jar(TableFormat.DELTA)]


def marked(*scenarios: str) -> list[Any]:
    def mark(name: str) -> pytest.MarkDecorator:
        return pytest.mark.thorough if name in SLICE else pytest.mark.tables

    return [pytest.param(name, marks=() if name in QUICK else mark(name)) for name in scenarios]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What a scenario of the program has left in its table."""

    @cache
    def played(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("delta-features")
        fetch_jars(TableFormat.DELTA, folder / "jars")
        return play("tests.sinks.delta_features_program", folder / "streams", folder / "jars", *names)

    rest = tuple(name for name in (*SHOWN, *SECOND_WRITES, *REFUSED) if name not in SLICE)
    slice_ = either(quick=QUICK, thorough=SLICE)
    return lambda scenario: played(rest if scenario in rest else slice_)[scenario]


@pytest.mark.parametrize("scenario", marked(*SHOWN))
def test_a_delta_table_shows_each_row_once_however_it_is_written(told: Told, scenario: str) -> None:
    shown = told(scenario)

    assert (shown["rows"], shown["refused"]) == (list(SHOWN[scenario]), None)


# Each file names a new shop and the one before, the first only shop 0, twice.
@pytest.mark.thorough(but="*killed before the commit-*")
@pytest.mark.parametrize(
    ("scenario", "counts"),
    [
        ("upserted", [[0, 3], [1, 2], [2, 2], [3, 2], [4, 1]]),
        ("upserted, and killed before the commit", [[0, 3], [1, 2], [2, 2], [3, 1]]),
    ],
)
def test_a_merge_updates_rows_from_whole_state(told: Told, scenario: str, counts: list[list[int]]) -> None:
    assert told(scenario)["counts"] == counts


@pytest.mark.parametrize("scenario", marked(*SECOND_WRITES))
def test_a_second_write_that_delta_would_drop_fails_and_says_how_to_name_it(told: Told, scenario: str) -> None:
    shown = told(scenario)

    assert SECOND_WRITES[scenario] in shown["refused"]
    assert "delta_transaction(batch, batch_id, " in shown["refused"]
    assert shown["rows"] == [0]


@pytest.mark.parametrize("scenario", marked(*REFUSED))
def test_a_start_is_refused_that_would_read_what_a_table_no_longer_has(told: Told, scenario: str) -> None:
    why, rows = REFUSED[scenario]
    shown = told(scenario)

    assert shown["refused"].startswith("InputGoneError")
    assert why in shown["refused"]
    assert shown["rows"] == list(rows)
