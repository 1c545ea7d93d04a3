"""Live directories of every stateful operator after half of the input, and after all of it, to read and compare."""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import spark_stateful_queries as queries
from pyspark.sql import DataFrame, SparkSession
from spark_scenarios import (
    FILES,
    HEAP,
    ROCKSDB,
    ROCKSDB_CHANGELOG,
    ROCKSDB_V2,
    ROCKSDB_V2_NO_CHANGELOG,
    Workload,
    run_to_the_end,
)

from dagster_ckpt.config.state_backend import StateBackend
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.versions import Feature
from dagster_ckpt.state.reading import StateKind, StateReader
from dagster_ckpt.state.rewriter import StateElsewhere, readers_of
from tests.support.needs import needs, needs_rewriter

BACKENDS: Mapping[str, StateBackend] = {
    "heap": HEAP,
    "rocksdb": ROCKSDB,
    "changelog": ROCKSDB_CHANGELOG,
    "v2": ROCKSDB_V2_NO_CHANGELOG,
    "v2-changelog": ROCKSDB_V2,
}
_JOIN = "spark.sql.streaming.join.stateFormatVersion"
_V, _S = StateKind.VALUE, StateKind.JOIN_SIDE
_VARIABLES = {"count": _V, "recent": StateKind.LIST, "by_rest": StateKind.MAP, "timers": StateKind.TIMERS}


@dataclass(frozen=True)
class StatefulQuery:
    """One operator, or a chain of them.

    Attributes:
        build: The query.
        states: Its states, by operator and name, in the order of the plan.
        mode: Output mode.
        settings: Further settings.
        needed: Features of Spark that it needs.
    """

    build: Callable[[DataFrame, DataFrame], DataFrame]
    states: Mapping[tuple[int, str], StateKind]
    mode: str = "append"
    settings: Mapping[str, str] = field(default_factory=dict)
    needed: tuple[Feature, ...] = ()


_ONE = {(0, "default"): _V}
_SIDES = {(0, "left"): _S, (0, "right"): _S}
_OWN = {(0, name): kind for name, kind in _VARIABLES.items()}
QUERIES: Mapping[str, StatefulQuery] = {
    "aggregation-by-window": StatefulQuery(queries.windowed_counts, _ONE),
    "aggregation-update": StatefulQuery(queries.counts_for_ever, _ONE, "update"),
    "aggregation-without-key": StatefulQuery(queries.one_total, _ONE, "update"),
    "session-window": StatefulQuery(queries.sessions, _ONE),
    "drop-duplicates": StatefulQuery(queries.first_of_each, _ONE),
    "drop-duplicates-event-time": StatefulQuery(queries.first_of_each_event, _ONE),
    "drop-duplicates-within-watermark": StatefulQuery(queries.first_within_watermark, _ONE),
    "inner-join": StatefulQuery(queries.inner_join, _SIDES, settings={_JOIN: "2"}),
    "left-outer-join": StatefulQuery(queries.left_outer_join, _SIDES, settings={_JOIN: "2"}),
    "left-outer-join-v3": StatefulQuery(
        queries.left_outer_join, _SIDES, settings={_JOIN: "3"}, needed=(Feature.JOIN_STATE_3,)
    ),
    "full-outer-join-v4": StatefulQuery(
        queries.full_outer_join, _SIDES, settings={_JOIN: "4"}, needed=(Feature.JOIN_STATE_4,)
    ),
    "pandas-with-state": StatefulQuery(queries.pandas_with_state, _ONE),
    "transform-with-state": StatefulQuery(queries.transform_rows, _OWN, needed=(Feature.TRANSFORM_WITH_STATE,)),
    "transform-with-state-in-pandas": StatefulQuery(
        queries.transform_pandas, _OWN, needed=(Feature.TRANSFORM_WITH_STATE_IN_PANDAS,)
    ),
    "limit": StatefulQuery(queries.first_rows, _ONE),
    "aggregation-over-join": StatefulQuery(
        queries.counts_over_a_join, {(0, "default"): _V, (1, "left"): _S, (1, "right"): _S}
    ),
    "aggregation-over-drop-duplicates": StatefulQuery(
        queries.counts_of_firsts, {(0, "default"): _V, (1, "default"): _V}
    ),
}

# One backend for each operator runs in every suite, the others by `make test-state`.
IN_SUITE = {
    "aggregation-by-window": "heap",
    "session-window": "v2-changelog",
    "drop-duplicates-event-time": "changelog",
    "left-outer-join": "heap",
    "left-outer-join-v3": "rocksdb",
    "full-outer-join-v4": "changelog",
    "pandas-with-state": "v2-changelog",
    "transform-with-state": "changelog",
    "limit": "heap",
}
_ROCKSDB_ONLY = ("transform-", "-v3", "-v4")


def _case(name: str, backend: str) -> pytest.ParameterSet:
    needed, reads = set(QUERIES[name].needed), {Feature.STATE_READER}
    if backend.startswith("v2"):
        needed.add(Feature.CHECKPOINT_FORMAT_2)
        if QUERIES[name].build in queries.IN_ONE_PARTITION:
            needed.add(Feature.CHECKPOINT_FORMAT_2_OF_ONE_PARTITION)
        reads.add(Feature.STATE_READER_FORMAT_2)
    marks = [needs(*sorted(needed)), needs_rewriter(*sorted(reads))]
    marks.append(pytest.mark.core if IN_SUITE.get(name) == backend else pytest.mark.state)
    return pytest.param((name, backend), marks=marks, id=f"{name}-{backend}")


CASES = [
    _case(name, backend)
    for name in QUERIES
    for backend in BACKENDS
    if backend != "heap" or not any(part in name for part in _ROCKSDB_ONLY)
]


@dataclass(frozen=True)
class Life:
    """What a query left behind.

    Attributes:
        query: The query.
        work: Its workload.
        early: Its directory after half of the input.
        late: Its directory after all of it.
        early_output: Its output after half of the input.
        files_per_batch: Files of the input in a batch.
    """

    query: StatefulQuery
    work: Workload
    early: LiveDirectory
    late: LiveDirectory
    early_output: Path
    files_per_batch: int = FILES // 4

    def read(self, spark: SparkSession, *, late: bool) -> StateReader:
        return reader_of(spark, self.late if late else self.early)


# What another Spark has read is in folders until the end of the process.
_FOLDERS = ExitStack()
atexit.register(_FOLDERS.close)
_READ_ELSEWHERE: dict[tuple[str, int], StateReader] = {}


def reader_of(spark: SparkSession, live: LiveDirectory) -> StateReader:
    commit = live.positions().commit
    assert commit is not None
    found = _READ_ELSEWHERE.get((live.url, commit))
    if found is None:
        found = _FOLDERS.enter_context(readers_of(spark, live, [commit]))[commit]
        if isinstance(found, StateElsewhere):
            _READ_ELSEWHERE[live.url, commit] = found
    return found


def live(spark: SparkSession, folder: Path, name: str, backend: str) -> Life:
    """Run a query over half of its input, keep a copy of its directory, and run it over the rest."""
    query = QUERIES[name]
    settings = {"spark.sql.shuffle.partitions": "3", **query.settings}
    work = Workload(query.build, BACKENDS[backend], folder, query.mode, settings)
    directory = LiveDirectory(str(folder / "live"))
    work.hold_back_input()
    for half in range(2):
        for number in range(half * FILES // 2, (half + 1) * FILES // 2):
            work.feed(number)
        run_to_the_end(spark, work, directory, files_per_batch=FILES // 4)
        if half == 0:
            # The maintenance of a state store may still write a file under a temporary name.
            shutil.copytree(folder / "live", folder / "early", ignore=shutil.ignore_patterns("*.tmp", "*.tmp.crc"))
            shutil.copytree(work.output, folder / "early-output")
    return Life(query, work, LiveDirectory(str(folder / "early")), directory, folder / "early-output")
