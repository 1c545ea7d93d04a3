"""Queries that stop, have their state rewritten, and go on: compared with the same stop without a rewrite."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import spark_scenarios as scenarios
import spark_stateful_queries as queries
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamWriter

from dagster_ckpt.config.state_backend import PROVIDER_CLASS, StateBackend
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import STATE_FORMAT
from dagster_ckpt.spark.checkpoint_dir.restore import clone
from dagster_ckpt.spark.query.query import start_query
from dagster_ckpt.spark.versions import Feature
from dagster_ckpt.state.rewriting import Rewritten, rewrite_state, shape_in
from dagster_ckpt.state.stopped_state import WantedShape
from tests.support.small_spark import lay_file

Build = Callable[[DataFrame, DataFrame], DataFrame]
FIRST, SECOND, THIRD = range(3), range(3, 5), range(5, 7)
_KEYS = 23

# Every stateful operator, with its output mode.
QUERIES: Mapping[str, tuple[Build, str]] = {
    "aggregation": (queries.windowed_counts, "append"),
    "aggregation-in-update-mode": (queries.counts_for_ever, "update"),
    "total-without-a-key": (queries.one_total, "update"),
    "session-window": (queries.sessions, "append"),
    "dropDuplicates": (queries.first_of_each, "append"),
    "dropDuplicates-with-event-time": (queries.first_of_each_event, "append"),
    "dropDuplicatesWithinWatermark": (queries.first_within_watermark, "append"),
    "inner-join": (queries.inner_join, "append"),
    "left-outer-join": (queries.left_outer_join, "append"),
    "full-outer-join": (queries.full_outer_join, "append"),
    "aggregation-over-a-join": (queries.counts_over_a_join, "append"),
    "aggregation-over-dropDuplicates": (queries.counts_of_firsts, "append"),
    "limit": (queries.first_rows, "append"),
    "applyInPandasWithState": (queries.pandas_with_state, "append"),
    "transformWithState": (queries.transform_rows, "append"),
    "transformWithStateInPandas": (queries.transform_pandas, "append"),
}
BACKENDS: Mapping[str, StateBackend] = {
    "heap": scenarios.HEAP,
    "rocksdb": scenarios.ROCKSDB,
    "changelog": scenarios.ROCKSDB_CHANGELOG,
    "v2": scenarios.ROCKSDB_V2_NO_CHANGELOG,
    "v2-changelog": scenarios.ROCKSDB_V2,
    "join-v3": scenarios.ROCKSDB_JOIN_V3,
}


def converts(query: str, before: str, after: str) -> bool:
    """Whether state can be converted; Spark does not read the counter of a limit."""
    is_changelog_only = {before, after} in ({"rocksdb", "changelog"}, {"v2", "v2-changelog"})
    return offers(query, before) and offers(query, after) and (query != "limit" or is_changelog_only)


def features_of(query: str, *backends: str) -> set[Feature]:
    """What a Spark needs to run a query with some backends."""
    features = {
        "v2": Feature.CHECKPOINT_FORMAT_2,
        "v2-changelog": Feature.CHECKPOINT_FORMAT_2,
        "join-v3": Feature.JOIN_STATE_3,
        "transformWithState": Feature.TRANSFORM_WITH_STATE,
        "transformWithStateInPandas": Feature.TRANSFORM_WITH_STATE_IN_PANDAS,
    }
    needed = {features[name] for name in (query, *backends) if name in features}
    if QUERIES[query][0] in queries.IN_ONE_PARTITION and Feature.CHECKPOINT_FORMAT_2 in needed:
        needed.add(Feature.CHECKPOINT_FORMAT_2_OF_ONE_PARTITION)
    return needed


def offers(query: str, backend: str) -> bool:
    """Whether Spark offers an operator with a backend."""
    if query.startswith("transformWithState"):
        return backend not in ("heap", "join-v3")
    return backend != "join-v3" or "join" in query


@dataclass(frozen=True)
class StoppedQuery:
    """A query that has read the first files and stopped. Its directory stays as it is.

    Attributes:
        work: The query.
        live: Its directory.
        fed: The files that it may have read, as a list of one number.
    """

    work: scenarios.Workload
    live: LiveDirectory
    fed: list[int] = field(default_factory=lambda: [len(FIRST)])

    @staticmethod
    def begin(spark: SparkSession, query: str, backend: str, partitions: int, folder: Path) -> StoppedQuery:
        build, mode = QUERIES[query]
        settings = {"spark.sql.shuffle.partitions": str(partitions)}
        work = scenarios.Workload(build, BACKENDS[backend], folder, mode, settings)
        for side in scenarios.SIDES:
            (folder / side).mkdir(parents=True)
            (folder / f"{side}-held-back").mkdir()
            _write_input(folder / f"{side}-held-back", side)
        for number in FIRST:
            work.feed(number)
        stopped = StoppedQuery(work, LiveDirectory(str(folder / "live-1")))
        stopped.go_on(spark, stopped.live, "first")
        return stopped

    def feed(self, files: Sequence[int]) -> None:
        for number in files:
            if number >= self.fed[0]:
                self.work.feed(number)
                self.fed[0] = number + 1

    def copy(self, name: str, *, at_batch: int | None = None) -> LiveDirectory:
        to = LiveDirectory(str(self.work.folder / name))
        clone(self.live, to, at_batch=at_batch)
        return to

    def go_on(self, spark: SparkSession, live: LiveDirectory, name: str, backend: str | None = None) -> list[str]:
        """Run to the end of the input, and return the rows of each batch."""
        work = self.work if backend is None else replace(self.work, backend=BACKENDS[backend])
        output = self.work.folder / f"output-{name}"
        writer = _to_files(work, work.session(spark), output).trigger(availableNow=True)
        query = start_query(writer, name, live)
        while not query.wait(0.1):
            pass
        assert query.exception() is None, query.exception()
        batches = sorted(output.iterdir(), key=lambda path: int(path.name)) if output.exists() else []
        return [f"{path.name}: {line}" for path in batches for line in path.read_text().splitlines()]

    def rewrite(
        self,
        spark: SparkSession,
        old: LiveDirectory,
        name: str,
        *,
        partitions: int | None = None,
        backend: str | None = None,
    ) -> LiveDirectory:
        """Rewrite the state into another directory, if it has to change."""
        shape = shape_in(old)
        assert shape is not None
        settings = BACKENDS[backend].spark_settings() if backend is not None else {}
        version = settings.get(STATE_FORMAT, "1") if backend is not None else None
        wanted = WantedShape(partitions, settings.get(PROVIDER_CLASS), int(version) if version else None).of(shape)
        if wanted == shape:
            return old
        new = LiveDirectory(str(self.work.folder / name))
        made = rewrite_state(self.work.session(spark), old, new, shape=wanted)
        _check(made, wanted.partitions)
        new.note_in_use()
        return new


def _check(made: Rewritten, partitions: int) -> None:
    assert inspect_live_directory(made.live).status is LiveStatus.GOOD
    shape = shape_in(made.live)
    assert shape == made.shape
    assert shape is not None
    assert shape.partitions == partitions


def _write_input(folder: Path, side: str) -> None:
    drawn = random.Random(side)
    for number in range(THIRD.stop):
        rows = [
            {
                "k": drawn.randrange(_KEYS),
                "v": number * 100 + drawn.randrange(100),
                "t": f"2024-01-01T00:{number:02}:{drawn.randrange(60):02}Z",
            }
            for _ in range(40)
        ]
        lay_file(folder, number, rows)


def _to_files(work: scenarios.Workload, session: SparkSession, output: Path) -> DataStreamWriter:
    left, right = (work._stream(session, side, 1) for side in scenarios.SIDES)
    writer = work.build(left, right).writeStream.outputMode(work.mode)
    return writer.foreachBatch(scenarios.write_batch_to(output))
