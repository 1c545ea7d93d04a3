"""State that is built from real Delta and Iceberg tables, and the counts of an uninterrupted run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from dagster_ckpt.spark.versions import TableFormat
from tests.recovery.test_state_changes_with_spark import REWRITES
from tests.support.shop_tables import PLAY_S, play
from tests.support.table_jars import fetch_jars, needs_jar

DELTA, ICEBERG = (pytest.param(each, marks=needs_jar(each), id=each.name.lower()) for each in TableFormat)
Reports = Callable[[TableFormat], dict[str, dict[str, Any]]]
pytestmark = [
    pytest.mark.spark,
    pytest.mark.state,
    pytest.mark.timeout(PLAY_S),
    pytest.mark.skipif(not REWRITES, reason="no Spark that rewrites state: see make test-state"),
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    @cache
    def played(table: TableFormat) -> dict[str, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(table.name.lower())
        fetch_jars(table, folder / "jars")
        program = "tests.recovery.bootstrap_program"
        return play(program, folder / "streams", folder / "jars", table.name.lower())

    return played


def counts_of(numbers: range) -> dict[str, int]:
    return {str(key): count for key, count in Counter(number % 3 for number in numbers).items()}


@pytest.mark.parametrize("table", [DELTA, ICEBERG])
@pytest.mark.parametrize(("scenario", "numbers"), [("counted", range(40)), ("within a version", range(30))])
def test_each_row_is_counted_once_up_to_the_position_and_behind_it(
    reports: Reports, table: TableFormat, scenario: str, numbers: range
) -> None:
    found = reports(table)[scenario]

    assert (found["refused"], found["counts"]) == (None, counts_of(numbers))


@pytest.mark.parametrize("table", [DELTA])
def test_rows_that_were_read_and_then_deleted_count(reports: Reports, table: TableFormat) -> None:
    found = reports(table)["rows were deleted"]

    assert (found["refused"], found["counts"]) == (None, counts_of(range(40)))


@pytest.mark.parametrize("table", [ICEBERG])
def test_a_stream_that_began_before_the_first_row_counts_from_the_first(reports: Reports, table: TableFormat) -> None:
    found = reports(table)["began empty"]

    assert (found["refused"], found["counts"]) == (None, counts_of(range(40)))


@pytest.mark.parametrize(
    ("table", "scenario", "why"),
    [
        pytest.param(*DELTA.values, "forgotten", "were deleted (VACUUM)", marks=DELTA.marks),
        pytest.param(*DELTA.values, "which rows is unknown", "Say with startingVersion", marks=DELTA.marks),
        pytest.param(*ICEBERG.values, "forgotten", "no longer exists (expire_snapshots)", marks=ICEBERG.marks),
        pytest.param(
            *ICEBERG.values,
            "began empty and forgotten",
            "from its first snapshot on, which no longer exists",
            marks=ICEBERG.marks,
        ),
    ],
)
def test_a_start_is_refused_that_would_count_other_rows(
    reports: Reports, table: TableFormat, scenario: str, why: str
) -> None:
    refused = reports(table)[scenario]["refused"]

    assert refused.startswith("The state cannot be built from")
    assert why in refused
