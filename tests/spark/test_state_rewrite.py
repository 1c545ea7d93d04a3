"""State rewritten to other partitions or another backend: the query goes on as if it had stopped and nothing else."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from state_rewrites import BACKENDS, QUERIES, SECOND, THIRD, StoppedQuery, converts, features_of, offers

from dagster_ckpt.errors import StartStoppedError, StateRewriteError
from dagster_ckpt.spark import jobs
from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry
from dagster_ckpt.spark.checkpoint_dir.operators import Operator
from dagster_ckpt.spark.checkpoint_dir.state_files import ROCKSDB
from dagster_ckpt.spark.versions import Feature
from dagster_ckpt.state import rewriting
from dagster_ckpt.state.rewriting import rewrite_state
from dagster_ckpt.state.stopped_state import StateShape, StateStoreName, StoppedState
from tests.support.needs import needs, needs_rewriter

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("warm_rewriter"), needs_rewriter()]
# Of the process that rewrites; the other tests run with a rewriter too.
in_this_process = needs(Feature.STATE_REWRITER)

# From this number of partitions to those, one after the other.
RESCALES = {"5-to-3": (5, 3), "5-to-12": (5, 12), "3-to-1": (3, 1), "12-to-5-to-12": (12, 5, 12)}
# In every run of the core; `make test-state` runs all.
SLICE = {
    ("aggregation-over-a-join", "changelog", "5-to-3"),
    ("total-without-a-key", "changelog", "5-to-12"),
    ("limit", "v2", "5-to-3"),
    ("limit", "heap", "5-to-12"),
    ("transformWithState", "v2-changelog", "3-to-1"),
    ("aggregation-in-update-mode", "rocksdb", "12-to-5-to-12"),
    ("session-window", "heap", "3-to-1"),
}
PAIRS_IN_SLICE = {("heap", "v2-changelog"), ("rocksdb", "heap"), ("v2", "changelog")}


def _cases() -> Iterator[object]:
    for query in QUERIES:
        for backend in BACKENDS:
            for rescale, partitions in RESCALES.items():
                if offers(query, backend):
                    marks = () if (query, backend, rescale) in SLICE else (pytest.mark.state,)
                    marks = (*marks, needs(*features_of(query, backend)))
                    yield pytest.param(query, backend, partitions, id=f"{query}-{backend}-{rescale}", marks=marks)


def _conversions() -> Iterator[object]:
    for query in QUERIES:
        for before, after in permutations([name for name in BACKENDS if name != "join-v3"], 2):
            if converts(query, before, after):
                is_in_slice = query == "aggregation-in-update-mode" and (before, after) in PAIRS_IN_SLICE
                marks = () if is_in_slice else (pytest.mark.state,)
                marks = (*marks, needs(*features_of(query, before, after)))
                yield pytest.param(query, before, after, id=f"{query}-{before}-to-{after}", marks=marks)


class Shelf:
    """Stopped queries, each run up to its stop once, with what it would have written without a rewrite."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._folder = folder
        self._controls: dict[tuple[str, str, int], tuple[StoppedQuery, list[str]]] = {}

    def stop(self, query: str, backend: str, partitions: int) -> StoppedQuery:
        folder = self._folder / f"{len(list(self._folder.iterdir()))}-{query}-{backend}-{partitions}"
        return StoppedQuery.begin(self._spark, query, backend, partitions, folder)

    def stopped(self, query: str, backend: str, partitions: int) -> tuple[StoppedQuery, list[str]]:
        key = query, backend, partitions
        if key not in self._controls:
            stopped = self.stop(*key)
            stopped.feed([*SECOND, *THIRD])
            self._controls[key] = stopped, stopped.go_on(self._spark, stopped.copy("control"), "control")
        return self._controls[key]


@pytest.fixture(scope="module")
def shelf(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(spark, tmp_path_factory.mktemp("stopped"))


@pytest.mark.thorough(sample="tests/recovery/test_state_rewrite_at_a_start.py")
@pytest.mark.parametrize(("query", "backend", "partitions"), list(_cases()))
def test_a_rescaled_query_goes_on_as_if_it_had_only_stopped(
    spark: SparkSession, shelf: Shelf, query: str, backend: str, partitions: tuple[int, ...]
) -> None:
    if len(partitions) == 2:
        before, after = partitions
        stopped, wanted = shelf.stopped(query, backend, before)
        live = stopped.rewrite(spark, stopped.live, f"as-{after}", partitions=after)
        assert stopped.go_on(spark, live, f"as-{after}") == wanted
        return
    stopped = shelf.stop(query, backend, partitions[0])
    control, live = stopped.copy("control"), stopped.live
    for files, number in zip((SECOND, THIRD), partitions[1:], strict=True):
        stopped.feed(files)
        live = stopped.rewrite(spark, live, f"rewritten-{number}", partitions=number)
        wanted = stopped.go_on(spark, control, f"control-{number}")
        assert stopped.go_on(spark, live, f"rewritten-{number}") == wanted


@pytest.mark.thorough(sample="tests/recovery/test_state_rewrite_at_a_start.py")
@pytest.mark.parametrize(("query", "before", "after"), list(_conversions()))
def test_a_query_goes_on_with_another_backend(
    spark: SparkSession, shelf: Shelf, query: str, before: str, after: str
) -> None:
    stopped, wanted = shelf.stopped(query, before, 5)
    live = stopped.rewrite(spark, stopped.live, f"as-{after}", backend=after)
    assert stopped.go_on(spark, live if live != stopped.live else stopped.copy(after), after, backend=after) == wanted


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["heap", "changelog"])
def test_a_batch_in_flight_is_replayed_as_planned(spark: SparkSession, shelf: Shelf, backend: str) -> None:
    stopped, _ = shelf.stopped("aggregation-in-update-mode", backend, 5)
    newest = stopped.live.positions().commit
    assert newest is not None
    old = stopped.copy("in-flight", at_batch=newest - 1)
    planned = sources_of(old, newest)
    live = stopped.rewrite(spark, old, "in-flight-rewritten", partitions=3)

    assert sources_of(live, newest) == planned
    assert stopped.go_on(spark, live, "replayed") == stopped.go_on(spark, old, "replayed-control")
    assert live.positions() == old.positions()


def sources_of(live: LiveDirectory, batch: int) -> dict[str, str | None]:
    path = f"offsets/{batch}"
    return dict(parse_offset_entry(live.folder.read(path), path).sources)


@pytest.mark.thorough
def test_no_snapshot_shares_state_with_one_from_before_the_rewrite(spark: SparkSession, shelf: Shelf) -> None:
    """Neither partitions nor provider change, and the commit has the same content: only the id of the rewrite tells."""
    stopped, _ = shelf.stopped("aggregation-in-update-mode", "changelog", 5)
    new = LiveDirectory(str(stopped.work.folder / "same-shape"))
    made = rewrite_state(spark, stopped.live, new)

    before, after = cut(stopped.live, carry_in_flight=False), cut(new, carry_in_flight=False)
    assert before.properties["state_layout"] != after.properties["state_layout"]
    assert after.properties["state_layout"][-1] == [made.rewrite_id]
    assert before.properties["state_partitions"] == after.properties["state_partitions"]
    new.note_in_use()
    stopped.go_on(spark, new, "same-shape")
    later = cut(new, carry_in_flight=False)
    assert later.batch_id > after.batch_id
    assert later.properties["state_layout"] == after.properties["state_layout"]


@in_this_process
def test_rows_that_differ_are_noticed_and_the_new_directory_is_deleted(
    spark: SparkSession, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, _ = shelf.stopped("aggregation-in-update-mode", "changelog", 5)
    rows = rewriting.rows_of

    def one_less(session: SparkSession, state: StoppedState, operator: Operator, store: StateStoreName) -> DataFrame:
        found = rows(session, state, operator, store)
        return found.where("partition_key.k <> 7") if state.live == stopped.live else found

    # What is read to be written lacks a row; what it is compared with has it.
    monkeypatch.setattr(rewriting._Rewrite, "rows", lambda self, *which: one_less(which[0], self.source, *which[1:]))
    new = LiveDirectory(str(stopped.work.folder / "differs"))
    with pytest.raises(StateRewriteError, match=r"default of operator 0 \(stateStoreSave\) has 23 rows before and 22"):
        rewrite_state(spark, stopped.live, new)
    assert not new.exists()


@in_this_process
def test_a_row_in_a_partition_in_which_spark_does_not_look_is_noticed(
    spark: SparkSession, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, _ = shelf.stopped("aggregation-in-update-mode", "changelog", 5)
    rows = rewriting._Rewrite.rows

    def in_turn(self: rewriting._Rewrite, *which: Any) -> DataFrame:
        return rows(self, *which).repartition(self.shape.partitions)

    monkeypatch.setattr(rewriting._Rewrite, "rows", in_turn)
    new = LiveDirectory(str(stopped.work.folder / "misplaced"))
    with pytest.raises(StateRewriteError, match="rows in partitions in which Spark does not look for them"):
        rewrite_state(spark, stopped.live, new, shape=StateShape(ROCKSDB, 3))
    assert not new.exists()


@in_this_process
def test_a_failure_in_spark_deletes_the_new_directory(spark: SparkSession, shelf: Shelf) -> None:
    stopped, _ = shelf.stopped("aggregation-in-update-mode", "changelog", 5)
    new = LiveDirectory(str(stopped.work.folder / "failed"))

    def fails(_store: StateStoreName, rows: DataFrame) -> DataFrame:
        return rows.where("raise_error('no such luck') is null")

    with pytest.raises(StateRewriteError, match="no such luck"):
        rewrite_state(spark, stopped.live, new, change_rows=fails)
    assert not new.exists()


@in_this_process
def test_rows_can_be_changed(spark: SparkSession, shelf: Shelf) -> None:
    stopped, _ = shelf.stopped("aggregation-in-update-mode", "heap", 5)
    new = LiveDirectory(str(stopped.work.folder / "without-7"))
    made = rewrite_state(spark, stopped.live, new, change_rows=lambda _store, rows: rows.where("partition_key.k <> 7"))

    reader = spark.read.format("statestore").option("batchId", made.batch_id)
    before, after = (
        {row.key.k: row.value for row in reader.load(live.spark_location).collect()} for live in (stopped.live, new)
    )
    assert after == {key: value for key, value in before.items() if key != 7}
    assert len(after) == len(before) - 1


@in_this_process
def test_a_long_rewrite_reports_the_store_and_its_tasks(
    spark: SparkSession, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "PROGRESS_EVERY_S", 0.1)
    stopped, _ = shelf.stopped("aggregation-in-update-mode", "changelog", 5)
    said: list[str] = []

    def slow(_store: StateStoreName, rows: DataFrame) -> DataFrame:
        return rows.where("reflect('java.lang.Thread', 'sleep', 60L) = 'null'")

    new = LiveDirectory(str(stopped.work.folder / "reported"))
    rewrite_state(spark, stopped.live, new, change_rows=slow, report=said.append)

    store = r"default of operator 0 \(stateStoreSave\), store 1 of 1"
    assert said
    assert all(re.fullmatch(rf"(writing|comparing) {store}(: \d+ of \d+ tasks)?", each) for each in said), said
    assert any(re.fullmatch(rf"writing {store}: \d+ of (5|10) tasks", each) for each in said), said


@in_this_process
def test_a_rewrite_is_one_job_group_that_can_be_canceled(spark: SparkSession, shelf: Shelf) -> None:
    stopped, _ = shelf.stopped("aggregation-in-update-mode", "changelog", 5)
    new = LiveDirectory(str(stopped.work.folder / "canceled"))
    seen: list[int] = []

    def slow(_store: StateStoreName, rows: DataFrame) -> DataFrame:
        return rows.where("reflect('java.lang.Thread', 'sleep', 600000L) is null")

    def watch() -> None:
        seen.extend(spark.sparkContext.statusTracker().getActiveJobsIds())
        if seen:
            raise StartStoppedError("canceled")

    began = time.monotonic()
    with pytest.raises(StartStoppedError):
        rewrite_state(spark, stopped.live, new, change_rows=slow, watch=watch)
    assert time.monotonic() - began < 60
    assert not new.exists()
