"""Spark queries that read each other's tables, restored to a savepoint set: row for row as if never stopped."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_ckpt.spark.versions import TableFormat
from tests.support.shop_tables import PLAY_S, Plays
from tests.support.table_jars import fetch_jars, needs_jar

pytestmark = [
    pytest.mark.spark,
    pytest.mark.thorough(sample="tests/spark/test_spark_savepoint_sets.py"),
    pytest.mark.timeout(PLAY_S),
    needs_jar(TableFormat.DELTA),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Plays:
    """What each scenario of the program has left in its tables."""
    folder = tmp_path_factory.mktemp("graphs")
    fetch_jars(TableFormat.DELTA, folder / "jars")
    return Plays("tests.spark.table_graph_program", folder, ())


@pytest.fixture(scope="module")
def told_of_iceberg(tmp_path_factory: pytest.TempPathFactory) -> Plays:
    folder = tmp_path_factory.mktemp("iceberg")
    fetch_jars(TableFormat.ICEBERG, folder / "jars")
    return Plays("tests.spark.iceberg_graph_program", folder, ())


@pytest.mark.parametrize("scenario", ["chain", "diamond", "twice"])
def test_restored_set_ends_as_an_uninterrupted_graph(told: Plays, scenario: str) -> None:
    assert_uninterrupted(told[scenario])


@needs_jar(TableFormat.ICEBERG)
@pytest.mark.parametrize("scenario", ["chain", "diamond", "twice"])
def test_restored_set_over_iceberg_ends_as_an_uninterrupted_graph(told_of_iceberg: Plays, scenario: str) -> None:
    assert_uninterrupted(told_of_iceberg[scenario])


def assert_uninterrupted(found: dict[str, Any]) -> None:
    assert found["unproven"] == []
    assert found["reads"]["daily"] == [["orders", 1, "TABLE"]]
    assert set(found["has read undone"].values()) == {True}
    assert (found["line is proven"], found["is back"], found["whole"]) == ([True, True], True, True)


@pytest.mark.parametrize("scenario", ["lags", "diamond lags"])
@pytest.mark.parametrize("of", ["told", "told_of_iceberg"])
def test_stream_that_has_not_read_what_is_undone_goes_on_behind_it(
    of: str, scenario: str, request: pytest.FixtureRequest
) -> None:
    found = request.getfixturevalue(of)[scenario]

    assert (set(found["has read undone"].values()), found["whole"]) == ({False}, True)


@pytest.mark.parametrize("of", ["told", "told_of_iceberg"])
def test_streams_downstream_follow_one_that_goes_back_alone(of: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(of)["follows"]

    assert (found["kinds"], found["whole"]) == (3 * ["RESTORE"], True)


def test_without_a_session_the_starts_roll_the_tables_back_upstream_first(told: Plays) -> None:
    assert "Start orders first" in told["has no session"]["refused"]
    assert told["has no session"]["whole"]
