"""Streams that read each other's tables, rewound to a savepoint set: what each scenario leaves, as JSON lines."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import CheckpointConfig, Client, RestartStrategies, run_stream
from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.errors import CkptError
from dagster_ckpt.sinks import delta
from dagster_ckpt.stream.start_from import StartFrom
from tests.sinks.delta_program import DELTA
from tests.support.shop_tables import tell
from tests.support.small_spark import SETTINGS, lay_file

Graph = dict[str, tuple[str, ...]]
CHAIN: Graph = {"orders": (), "daily": ("orders",), "totals": ("daily",)}
DIAMOND: Graph = {"orders": (), "daily": ("orders",), "alerts": ("orders",), "totals": ("daily", "alerts")}
ROWS = 5


class Pipeline:
    """Each stream keeps every row once that it finds in the tables of its upstream, which needs state."""

    scenarios: ClassVar[tuple[str, ...]] = (
        "chain",
        "diamond",
        "twice",
        "lags",
        "diamond lags",
        "follows",
        "has no session",
    )
    # Whether its sinks cannot be rolled back.
    only_as_a_new_query: ClassVar[bool] = False

    def __init__(self, spark: SparkSession, root: Path, graph: Graph = CHAIN) -> None:
        self.spark, self.root, self.graph = spark, root, graph
        self.places = {
            "catalog": f"sqlite:///{root}/catalog.db",
            "storage": f"file://{root}/snapshots",
            "live_root": f"{root}/live",
        }
        self.files = 0
        # Otherwise they keep what they read, and what they read twice is there twice.
        self.drops_repeated = True
        (root / "in").mkdir(parents=True)

    def feed(self, files: int) -> None:
        for number in range(self.files, self.files + files):
            lay_file(self.root / "in", number, [{"a": 3 * number + row} for row in range(ROWS)])
        self.files += files

    def run(self, *streams: str, start_from: StartFrom | str = "latest") -> None:
        """Let each of them read what there is, a file a batch."""
        for stream in streams or self.graph:
            run_stream(
                stream,
                lambda spark, stream=stream: self.query(spark, stream),
                **self.places,
                spark=self.spark,
                start_from=start_from,
                restart_strategy=RestartStrategies.no_restart(),
                checkpointing=CheckpointConfig(cleanup="RETAIN_ON_CANCELLATION"),
            )

    def query(self, spark: SparkSession, stream: str) -> DataStreamWriter:
        files = spark.readStream.schema("a long").option("maxFilesPerTrigger", 1)
        rows = [self.table(spark, each) for each in self.graph[stream]] or [files.json(str(self.root / "in"))]
        found = rows[0]
        for other in rows[1:]:
            found = found.union(other)
        found = found.dropDuplicates(["a"]) if self.drops_repeated else found
        return self.into(stream, found).trigger(availableNow=True)

    def table(self, spark: SparkSession, stream: str) -> DataFrame:
        return spark.readStream.format("delta").option("maxFilesPerTrigger", 1).load(str(self.root / stream))

    def into(self, stream: str, rows: DataFrame) -> DataStreamWriter:
        return rows.writeStream.format("delta").option("path", str(self.root / stream))

    def rows_in(self, stream: str) -> DataFrame:
        return self.spark.read.format("delta").load(str(self.root / stream))

    def rows(self) -> dict[str, list[int]]:
        return {stream: sorted(row.a for row in self.rows_in(stream).collect()) for stream in self.graph}

    def client(self) -> Client:
        return Client(**self.places)


def whole(pipeline: Pipeline) -> bool:
    """Whether each table has the rows of an uninterrupted run: those of all files, once."""
    expected = Counter(number for file in range(pipeline.files) for number in range(3 * file, 3 * file + ROWS))
    if pipeline.drops_repeated:
        expected = Counter(expected.keys())
    return all(Counter(rows) == expected for rows in pipeline.rows().values())


def back(pipeline: Pipeline, savepoint: SnapshotRecord) -> StartFrom:
    return StartFrom(savepoint.snapshot_id, new_query_id=pipeline.only_as_a_new_query)


def lagging(pipeline: Pipeline) -> None:
    """Each stream has read a part of what its upstream has written."""
    pipeline.feed(2)
    pipeline.run("orders")
    pipeline.run(*list(pipeline.graph)[1:])
    pipeline.feed(1)
    pipeline.run("orders")


def rewound(pipeline: Pipeline, *, start: Callable[[], None] | None = None) -> dict[str, Any]:
    """A set while streams lag behind, more batches, back to the set, and to the end."""
    lagging(pipeline)
    with pipeline.client() as client:
        taken = client.trigger_savepoint_set("orders+", label="june")
        at_set = pipeline.rows()
        pipeline.feed(2)
        pipeline.run()
        line = client.recovery_line("orders+")
        alone = client.preview_rewind("orders", start_from=back(pipeline, taken.savepoints["orders"]))
        client.restart_savepoint_set("june", start=False)
    is_back = pipeline.rows() == at_set
    (start or pipeline.run)()
    with pipeline.client() as client:
        after = client.recovery_line("orders+")
    reads = [(stream, taken.savepoints[stream].properties["reads"]) for stream in pipeline.graph]
    return {
        "reads": {
            stream: [(each["upstream"], each["batch"], each["kind"]) for each in found] for stream, found in reads
        },
        "unproven": taken.unproven,
        "line is proven": [line.is_proven, after.is_proven],
        "has read undone": {each.stream_id: each.has_read_undone for each in alone.readers},
        "is back": is_back,
        "whole": whole(pipeline),
    }


def chain(spark: SparkSession, root: Path, kind: type[Pipeline]) -> dict[str, Any]:
    return rewound(kind(spark, root))


def diamond(spark: SparkSession, root: Path, kind: type[Pipeline]) -> dict[str, Any]:
    return rewound(kind(spark, root, DIAMOND))


def twice(spark: SparkSession, root: Path, kind: type[Pipeline]) -> dict[str, Any]:
    """Back to the same set again, after what was read behind the first roll-back."""
    pipeline = kind(spark, root)

    def start() -> None:
        pipeline.feed(1)
        pipeline.run()
        with pipeline.client() as client:
            client.restart_savepoint_set("june", start=False)
        pipeline.run()

    return rewound(pipeline, start=start)


def lags(spark: SparkSession, root: Path, kind: type[Pipeline], graph: Graph = CHAIN) -> dict[str, Any]:
    """Only the first stream goes back, and its readers had not read what that undoes."""
    pipeline = kind(spark, root, graph)
    lagging(pipeline)
    with pipeline.client() as client:
        named = client.trigger_savepoint("orders", label="june")
        pipeline.feed(2)
        pipeline.run("orders")
        ahead = client.preview_rewind("orders", start_from=back(pipeline, named))
    pipeline.run("orders", start_from=back(pipeline, named))
    pipeline.run(*list(graph)[1:])
    return {
        "has read undone": {each.stream_id: each.has_read_undone for each in ahead.readers},
        "whole": whole(pipeline),
    }


def diamond_lags(spark: SparkSession, root: Path, kind: type[Pipeline]) -> dict[str, Any]:
    return lags(spark, root, kind, DIAMOND)


def follows(spark: SparkSession, root: Path, kind: type[Pipeline]) -> dict[str, Any]:
    """Only the first stream goes back. Its readers had read what that undoes, and follow it by themselves."""
    pipeline = kind(spark, root)
    pipeline.drops_repeated = False
    pipeline.feed(2)
    pipeline.run()
    with pipeline.client() as client:
        named = [client.trigger_savepoint(stream, label="june") for stream in pipeline.graph]
        pipeline.feed(2)
        pipeline.run()
        pipeline.run("orders", start_from=back(pipeline, named[0]))
        pipeline.run("daily", "totals")
        started = [client.describe_stream(stream).executions[0].recovery or {} for stream in pipeline.graph]
    return {"kinds": [each["kind"] for each in started], "whole": whole(pipeline)}


def has_no_session(spark: SparkSession, root: Path, kind: type[Pipeline]) -> dict[str, Any]:
    """The command line has no session: the starts roll the tables back, upstream first."""
    pipeline = kind(spark, root)
    lagging(pipeline)
    with pipeline.client() as client, patch.object(delta, "active_session", lambda: None):
        client.trigger_savepoint_set("orders+", label="june")
        pipeline.feed(2)
        pipeline.run()
        client.restart_savepoint_set("june", start=False)
    refused = ""
    try:
        pipeline.run("daily")
    except CkptError as error:
        refused = str(error)
    pipeline.run()
    return {"refused": refused, "whole": whole(pipeline)}


SCENARIOS = {
    "chain": chain,
    "diamond": diamond,
    "twice": twice,
    "lags": lags,
    "diamond lags": diamond_lags,
    "follows": follows,
    "has no session": has_no_session,
}


def play(spark: SparkSession, folder: Path, kind: type[Pipeline], only: Sequence[str] = ()) -> None:
    """Play the scenarios with these names, by default all."""
    for name, scenario in SCENARIOS.items():
        if name in kind.scenarios and (not only or name in only):
            tell({"scenario": name, **scenario(spark, folder / name.replace(" ", "_"), kind)})
    spark.stop()


if __name__ == "__main__":
    settings = {**SETTINGS, **DELTA, "spark.jars": sys.argv[2]}
    session = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    play(session, Path(sys.argv[1]), Pipeline, sys.argv[3:])
