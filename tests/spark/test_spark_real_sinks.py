"""Spark's own sinks as they are: how each is called, and what it does with batches that come again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt.sinks.file_sink_log import roll_back
from dagster_ckpt.sinks.registry import forecast
from dagster_ckpt.sinks.sink import Replay, SinkEffect
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import clone
from dagster_ckpt.spark.query.query import start_query
from tests.support.small_spark import lay_file, small_spark

pytestmark = pytest.mark.spark

LAST, BACK_TO = 3, 1


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


@dataclass
class Output:
    """A query of one row a batch, and what has come out of it; `batches` are those that it was given rows in."""

    spark: SparkSession
    root: Path
    batches: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.root / "in").mkdir()
        (self.root / "rows").mkdir()
        for number in range(LAST + 1):
            lay_file(self.root / "in", number, [{"k": number}])

    def writer(self, sink: str) -> DataStreamWriter:
        rows = self.spark.readStream.schema("k long").option("maxFilesPerTrigger", 1).json(str(self.root / "in"))
        writer = rows.groupBy("k").count().writeStream.outputMode("update").trigger(availableNow=True)
        folder = str(self.root / "rows")

        def note(row: Any) -> None:
            with (Path(folder) / str(row.k)).open("a") as file:
                file.write("x")

        def note_all(batch: DataFrame, batch_id: int) -> None:
            for row in batch.collect():
                note(row)

        if sink == "foreachBatch":
            return writer.foreachBatch(note_all)
        if sink == "json":
            return rows.writeStream.trigger(availableNow=True).format("json").option("path", str(self.root / "out"))
        return writer.foreach(note) if sink == "foreach" else writer.format(sink)

    def run(self, sink: str, live: LiveDirectory) -> str:
        """Run to the end of the input; returns what Spark calls the sink."""
        query = start_query(self.writer(sink), sink, live)
        while not query.wait(0.5):
            pass
        assert query.exception() is None, query.exception()
        reports = [json.loads(report.json) for report in query._query.recentProgress]
        self.batches += [report["batchId"] for report in reports if report["numInputRows"]]
        (name,) = {str(report["sink"]["description"]) for report in reports}
        return name

    def times(self) -> dict[int, int]:
        """How often each row has come out."""
        return {int(path.name): len(path.read_text()) for path in sorted((self.root / "rows").iterdir())}


@pytest.fixture
def output(spark: SparkSession, tmp_path: Path) -> Output:
    return Output(spark, tmp_path)


def rewound(output: Output, sink: str) -> tuple[str, LiveDirectory]:
    """Run a query, go back to a batch, and run it to the end again; returns the sink's name and the new directory."""
    before, after = (LiveDirectory(f"file://{output.root}/live-{number}") for number in (0, 1))
    name = output.run(sink, before)
    assert before.positions().commit == LAST
    clone(before, after, at_batch=BACK_TO)
    output.run(sink, after)
    return name, after


def effect(name: str) -> SinkEffect:
    return forecast(name, Replay(BACK_TO, "a query")).effect


def counts(spark: SparkSession, live: LiveDirectory) -> dict[int, int]:
    rows = spark.read.format("statestore").load(live.spark_location).selectExpr("key.k AS k", "value.count AS n")
    return {row.k: row.n for row in rows.collect()}


def test_noop_keeps_nothing_and_the_state_counts_each_row_once(output: Output) -> None:
    name, live = rewound(output, "noop")

    assert effect(name) is SinkEffect.EXACT
    assert live.positions().commit == LAST
    assert counts(output.spark, live) == dict.fromkeys(range(LAST + 1), 1)
    assert output.times() == {}


def test_a_file_sink_whose_log_was_emptied_shows_each_row_once_after_a_start_from_nothing(output: Output) -> None:
    name = output.run("json", LiveDirectory(f"file://{output.root}/live-0"))
    told = forecast(name, Replay(-1, "a query", keeps_query_id=False)).effect
    roll_back(str(output.root / "out"), -1, (), still_mine=nullcontext)

    output.run("json", LiveDirectory(f"file://{output.root}/live-1"))

    assert told is SinkEffect.EXACT
    shown = output.spark.read.json(str(output.root / "out")).collect()
    assert sorted(row.k for row in shown) == list(range(LAST + 1))


@pytest.mark.thorough(but="foreachBatch")
@pytest.mark.parametrize("sink", ["foreachBatch", "foreach"])
def test_functions_of_the_user_get_the_rewound_rows_once_more(output: Output, sink: str) -> None:
    name, _ = rewound(output, sink)

    assert effect(name) is SinkEffect.UNKNOWN
    assert output.times() == {k: 1 if k <= BACK_TO else 2 for k in range(LAST + 1)}


@pytest.mark.thorough
def test_the_console_is_given_the_rewound_batches_once_more(output: Output) -> None:
    name, _ = rewound(output, "console")

    assert effect(name) is SinkEffect.DUPLICATE
    assert output.batches == [0, 1, 2, 3, 2, 3]


def test_a_memory_table_is_told_to_be_gone_with_its_session(output: Output) -> None:
    assert effect(output.run("memory", LiveDirectory(f"file://{output.root}/live-0"))) is SinkEffect.UNKNOWN
