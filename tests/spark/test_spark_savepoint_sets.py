"""Spark queries that read each other's Parquet output, restored to a set: row for row as if never stopped."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import CheckpointConfig, Client, RestartStrategies, run_stream
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.small_spark import lay_file

pytestmark = pytest.mark.spark
GRAPHS = {
    "chain": {"orders": (), "daily": ("orders",), "totals": ("daily",)},
    "diamond": {"orders": (), "daily": ("orders",), "alerts": ("orders",), "totals": ("daily", "alerts")},
}


class Pipeline:
    """Each stream keeps every row once that it finds in the files of its upstream, which needs state."""

    def __init__(self, spark: SparkSession, root: Path, graph: dict[str, tuple[str, ...]]) -> None:
        self.spark, self.root, self.graph = spark, root, graph
        self.places = {
            "catalog": f"sqlite:///{root}/catalog.db",
            "storage": f"file://{root}/snapshots",
            "live_root": f"{root}/live",
        }
        self.files = 0
        (root / "in").mkdir(parents=True)

    def feed(self, files: int) -> None:
        for number in range(self.files, self.files + files):
            lay_file(self.root / "in", number, [{"a": 3 * number + row} for row in range(5)])
        self.files += files

    def run(self, *streams: str, start_from: StartFrom | None = None) -> None:
        """Let each of them read what there is, a file a batch."""
        for stream in streams:
            run_stream(
                stream,
                lambda spark, stream=stream: self.query(spark, stream),
                **self.places,
                spark=self.spark,
                start_from=start_from or StartFrom(),
                restart_strategy=RestartStrategies.no_restart(),
                checkpointing=CheckpointConfig(cleanup="RETAIN_ON_CANCELLATION"),
            )

    def query(self, spark: SparkSession, stream: str) -> DataStreamWriter:
        reader = spark.readStream.schema("a long").option("maxFilesPerTrigger", 1)
        folders = [str(self.root / each) for each in self.graph[stream]]
        rows = [reader.parquet(each) for each in folders] or [reader.json(str(self.root / "in"))]
        found: DataFrame = rows[0]
        for other in rows[1:]:
            found = found.union(other)
        return (
            self.kept(found)
            .writeStream.format("parquet")
            .option("path", str(self.root / stream))
            .trigger(availableNow=True)
        )

    def kept(self, rows: DataFrame) -> DataFrame:
        return rows.dropDuplicates(["a"])

    def rows(self) -> dict[str, Counter[Any]]:
        return {
            stream: Counter(row.a for row in self.spark.read.parquet(str(self.root / stream)).collect())
            for stream in self.graph
        }


@pytest.mark.thorough(but=("chain",))
@pytest.mark.parametrize("graph", GRAPHS)
def test_restored_set_ends_as_an_uninterrupted_graph(spark: SparkSession, tmp_path: Path, graph: str) -> None:
    pipeline = Pipeline(spark, tmp_path / "rewound", GRAPHS[graph])
    pipeline.feed(3)
    pipeline.run("orders", "daily")
    pipeline.feed(2)
    # Past the first compaction of the log of its sink; the others are behind it.
    pipeline.run("orders", *list(GRAPHS[graph])[2:])
    with Client(**pipeline.places) as client:
        taken = client.trigger_savepoint_set("orders+", label="june")
        at_set = pipeline.rows()
        pipeline.feed(4)
        pipeline.run(*GRAPHS[graph])

        alone = client.preview_rewind("orders", start_from=StartFrom(taken.savepoints["orders"].snapshot_id))
        line = client.recovery_line("orders+")
        client.restart_savepoint_set("june", start=False)

    assert taken.savepoints["orders"].batch_id == 4
    read = taken.savepoints["daily"].properties["reads"]
    assert [(each["upstream"], each["batch"], each["kind"]) for each in read] == [("orders", 2, "FILES")]
    assert {each.stream_id: each.has_read_undone for each in alone.readers} == dict.fromkeys(
        list(GRAPHS[graph])[1:], True
    )
    assert line.is_proven
    assert pipeline.rows() == at_set
    pipeline.run(*GRAPHS[graph])
    whole = Pipeline(spark, tmp_path / "whole", GRAPHS[graph])
    whole.feed(9)
    whole.run(*GRAPHS[graph])
    assert pipeline.rows() == whole.rows() == {stream: Counter(range(29)) for stream in GRAPHS[graph]}


class Copies(Pipeline):
    """Each stream keeps what it reads, so what it reads twice is there twice."""

    def kept(self, rows: DataFrame) -> DataFrame:
        return rows


@pytest.mark.thorough(but="daily only counts")
@pytest.mark.parametrize("accepted", ["", "daily only counts"])
def test_streams_downstream_follow_one_that_goes_back_alone(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, accepted: str
) -> None:
    caplog.set_level("INFO")
    streams = list(GRAPHS["chain"])
    pipeline = Copies(spark, tmp_path, GRAPHS["chain"])
    pipeline.feed(2)
    pipeline.run(*streams)
    with Client(**pipeline.places) as client:
        for stream in streams:
            client.trigger_savepoint(stream, label="june")
        pipeline.feed(2)
        pipeline.run(*streams)
        pipeline.run("orders", start_from=StartFrom("june", accept_undone=accepted))
        pipeline.run("daily", "totals")
        started = [client.describe_stream(stream).executions[0].recovery or {} for stream in streams]

    assert [each["kind"] for each in started] == ["RESTORE", *2 * ["RESUME" if accepted else "RESTORE"]]
    reported = [each.getMessage() for each in caplog.records if "downstream stream daily has read" in each.getMessage()]
    assert len(reported) == 1
    assert ("It keeps them: daily only counts" if accepted else "Its next start goes back to june") in reported[0]
    once = Counter(3 * number + row for number in range(4) for row in range(5))
    undone = Counter(3 * number + row for number in (2, 3) for row in range(5)) if accepted else Counter()
    assert pipeline.rows() == {"orders": once, "daily": once + undone, "totals": once + undone}
