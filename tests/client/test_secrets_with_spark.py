"""What Spark and a failing query are given to know is in no log of the query, no snapshot, no record and no message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from dagster_ckpt.client.preflight import preflight
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import EndKind, Outcome, RunRequest
from dagster_ckpt.spark.query.description import QueryToStart
from dagster_ckpt.spark.query.query import start_query
from tests.support import verbs
from tests.support.log_lines import collecting
from tests.support.planted_secrets import Planted, files_below
from tests.support.query_bench import make_stream
from tests.support.small_spark import lay_file, small_spark

pytestmark = pytest.mark.spark

PLANTED = Planted()
SETTINGS = {
    "spark.hadoop.fs.s3a.secret.key": PLANTED.plant("hadoop"),
    "spark.sql.catalog.x.password": PLANTED.plant("catalog"),
    "spark.sql.streaming.stateStore.redis.password": PLANTED.plant("state"),
}
JDBC = f"cannot connect to jdbc:postgresql://u:{PLANTED.plant('jdbc')}@h/db, password={PLANTED.plant('keyword')}"
SOURCE, SINK = PLANTED.plant("source"), PLANTED.plant("sink")


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark(SETTINGS) as session:
        yield session


def test_no_output_has_a_secret_that_was_planted(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "landing").mkdir()
    for number in range(2):
        lay_file(tmp_path / "landing", number, [{"k": n % 3, "at": "2024-01-01T00:00:00Z"} for n in range(9)])
    stream = replace(make_stream(tmp_path), code_version="1")
    reports: list[str] = []
    fails = False

    def write(rows: DataFrame, _batch: int) -> None:
        rows.write.format("noop").mode("append").save()
        if fails:
            raise ValueError(JDBC)

    def describe() -> Any:
        rows = spark.readStream.schema("k long, at timestamp").option("password", SOURCE)
        counts = rows.json(str(tmp_path / "landing")).groupBy("k").count()
        writer = counts.writeStream.outputMode("update").option("kafka.sasl.jaas.config", SINK).foreachBatch(write)
        return writer.trigger(availableNow=True)

    def run() -> Outcome:
        query = QueryToStart(describe)
        start = RunRequest("run", lambda live: start_query(query.take(), "orders", live), query.described)
        with collecting(reports):
            return execute_stream(stream, start)

    assert run().end.kind is EndKind.ENDED_BY_ITSELF
    savepoint = verbs.trigger_savepoint(stream, origin="a test")
    fails = True
    lay_file(tmp_path / "landing", 2, [{"k": 1, "at": "2024-01-01T00:00:00Z"}])
    failed = run()
    assert failed.end.kind is EndKind.FAILED
    assert "jdbc:postgresql://***@h/db" in failed.end.reason, "what is no secret is still said"
    tried = preflight(stream, describe)

    stream.catalog.close()
    PLANTED.assert_in_none(
        {
            **files_below(tmp_path),
            "reports": "\n".join(reports),
            "end": repr(failed),
            "savepoint": repr(savepoint),
            "preflight": repr(tried),
            "stream": repr(stream),
        }
    )
