"""A plain Spark query into a real table is adopted, loses its directory, goes back, and is exported to plain Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagster_ckpt.spark.versions import TableFormat
from tests.support.shop_tables import PLAY_S, play
from tests.support.table_jars import fetch_jars, needs_jar

pytestmark = [pytest.mark.spark, pytest.mark.tables, pytest.mark.timeout(PLAY_S)]


@pytest.mark.parametrize("table", [pytest.param(table, marks=needs_jar(table)) for table in TableFormat], ids=str)
def test_the_table_of_an_adopted_query_shows_each_row_once_until_plain_spark_has_it_again(
    tmp_path: Path, table: TableFormat
) -> None:
    fetch_jars(table, tmp_path / "jars")
    program = f"tests.sinks.{table}_program"

    told = play(program, tmp_path / "streams", tmp_path / "jars", "adopted")["adopted"]

    assert (told["rows"], told["refused"]) == (list(range(6)), None)
