"""Rewrite the state of batch N in one directory as batch N of another: in another shape, or with other rows.

The batch keeps its number, so sinks, sources and watermarks do not notice; Spark's own `repartition` adds a batch, and
misplaces the row of an aggregation without a key. Count and hash of the rows of each partition are compared with the
source.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from dagster_ckpt.errors import IncompleteCutError, StateRewriteError
from dagster_ckpt.io.file_io import no_op
from dagster_ckpt.spark.checkpoint_dir.inspect import pinned_partitions, pinned_state
from dagster_ckpt.spark.checkpoint_dir.layout import STATE, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import read_commit_entry
from dagster_ckpt.spark.checkpoint_dir.operators import LIMIT, Operator
from dagster_ckpt.spark.checkpoint_dir.restore import Watch
from dagster_ckpt.spark.checkpoint_dir.state_files import HEAP, ROCKSDB
from dagster_ckpt.spark.jobs import JobProgress, in_job_group
from dagster_ckpt.spark.versions import Feature, release_of
from dagster_ckpt.state.heap import HeapStore
from dagster_ckpt.state.rewriter import (
    Report,
    Rewriter,
    rewrite_elsewhere,
    rewriter_for,
    run_rewriter,
)
from dagster_ckpt.state.stopped_state import (
    StateIds,
    StateShape,
    StateStoreName,
    StoppedState,
    StoredState,
    check_rewrite,
    copy_operators,
    described,
    is_readable,
    refuse_existing,
    rows_of,
    state_session,
    stores_of,
    without_description,
    write_skeleton,
    write_state_ids,
)
from dagster_ckpt.state.unsafe_rows import PARTITION_KEY, Graft, TakenRows, with_values
from dagster_ckpt.values.safe_parsing import number_in

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


@dataclass(frozen=True)
class StoreDigest:
    rows: int
    digest: int


def digests(rows: DataFrame, partition: Column) -> dict[int, StoreDigest]:
    from pyspark.sql import functions as F

    hashed = F.xxhash64("column_family_name", "key_bytes", "value_bytes").cast("decimal(38,0)")
    placed = rows.select(partition.alias("partition"), hashed.alias("hash")).groupBy("partition")
    found = placed.agg(F.count("*").alias("rows"), F.sum("hash").alias("digest")).collect()
    return {row.partition: StoreDigest(row.rows, int(row.digest)) for row in found}


def compare_rows(
    stores: list[tuple[Operator, StateStoreName]],
    wanted: Callable[[Operator, StateStoreName], tuple[DataFrame, Column]],
    written: Callable[[Operator, StateStoreName], DataFrame],
) -> dict[StateStoreName, StoreDigest]:
    """Compare written rows with `wanted`, which also returns the partition where the query looks for each."""
    from pyspark.sql import functions as F

    found = {}
    for operator, store in stores:
        was = digests(*wanted(operator, store))
        now = digests(written(operator, store), F.spark_partition_id())
        if was != now:
            raise StateRewriteError(
                f"The rewritten state differs from the original: {store} has {_difference(was, now)}. The new "
                "directory was deleted, and the stream is unchanged. Please report this, with the versions of Spark "
                "and dagster-ckpt."
            )
        found[store] = _total(now)
    return found


def _difference(was: Mapping[int, StoreDigest], now: Mapping[int, StoreDigest]) -> str:
    before, after = _total(was), _total(now)
    if before.rows != after.rows:
        return f"{before.rows:,} rows before and {after.rows:,} after"
    return "other rows" if before != after else "rows in partitions in which Spark does not look for them"


def _total(partitions: Mapping[int, StoreDigest]) -> StoreDigest:
    each = partitions.values()
    return StoreDigest(sum(one.rows for one in each), sum(one.digest for one in each))


def check_directories(rewritten: StoppedState, partitions: int) -> None:
    for operator in rewritten.operators:
        names = rewritten.live.folder.list(f"{STATE}/{operator.number}")
        found = {number for name in names if (number := number_in(name)) is not None}
        expected = 1 if operator.single_partition else partitions
        if found != set(range(expected)):
            raise StateRewriteError(
                f"The rewritten state of operator {operator.number} ({operator.name}) has {len(found)} directories of "
                f"partitions instead of {expected}. The new directory was deleted, and the stream is unchanged. Please "
                "report this, with the versions of Spark and dagster-ckpt."
            )


_CUTS = 3
# Gets a store and its rows (`partition_key`: the columns that decide the partition; `key_bytes` and `value_bytes` as
# Spark encodes them; `column_family_name`) and returns the rows to write.
RowChange = Callable[[StateStoreName, "DataFrame"], "DataFrame"]


@dataclass(frozen=True)
class Rewritten:
    """A directory whose state was rewritten; it is marked as not in use.

    Attributes:
        rewrite_id: No snapshot of the directory shares state with one from before.
    """

    live: LiveDirectory
    batch_id: int
    rewrite_id: str
    shape: StateShape
    stores: Mapping[StateStoreName, StoreDigest]
    took_ms: int

    def __str__(self) -> str:
        return f"rewrote the state as {self.shape} in {self.took_ms / 1000:.1f} s: {self.rows:,} rows compared"

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.stores.values())


def shape_in(live: LiveDirectory) -> StateShape | None:
    pinned, partitions, commit = pinned_state(live), pinned_partitions(live), live.positions().commit
    if pinned.provider is None or partitions is None or commit is None:
        return None
    ids = read_commit_entry(live.folder, commit).state_ids
    return StateShape(pinned.provider, partitions, 1 if ids is None else 2)


def stored_state(live: LiveDirectory) -> StoredState | None:
    """Return None for a stateless query. A query may run in the directory."""
    for _ in range(_CUTS):
        with suppress(IncompleteCutError):
            return StoppedState.read(live).stored
    return StoppedState.read(live).stored


def rewrite_state(
    spark: SparkSession,
    source: LiveDirectory,
    target: LiveDirectory,
    *,
    shape: StateShape | None = None,
    change_rows: RowChange | None = None,
    graft: Graft | None = None,
    watch: Watch = no_op,
    report: Report = lambda _message: None,
) -> Rewritten:
    """Rewrite the state after the newest batch of a directory into a new directory, which is deleted on any error.

    Executors do it, perhaps those of another Spark: see `rewriter.py`. The new directory replays the batch in flight.

    Args:
        spark: Session whose settings of the state store apply.
        target: Directory to create; executors must reach both by these URLs.
        change_rows: Function that says which rows to write; not called for a limit, which has only a counter.
        graft: Another query's operators; with them `shape` is ignored.
    """
    # A function cannot be passed to another Spark; `editing.py` passes the edits.
    elsewhere = rewriter_for(spark) if change_rows is None else None
    # Before anything is built, because any later error deletes the target.
    refuse_existing(target)
    state = StoppedState.read(source)
    if graft is not None:
        return _grafted(spark, elsewhere, state, target, graft, watch=watch, report=report)
    if state.stored is None:
        raise StateRewriteError(f"{source.url}: the query keeps no state, so there is nothing to rewrite.")
    before = state.stored.shape
    shape = shape or before
    check_rewrite(state.stored, shape, changes_rows=change_rows is not None)
    if shape.checkpoint_format == 2 and any(operator.single_partition for operator in state.operators):
        feature = Feature.CHECKPOINT_FORMAT_2_OF_ONE_PARTITION
        release_of(spark.version).require(feature, f"Rewriting the state of {source.url} as {shape}")
    if elsewhere is not None:
        return _elsewhere(elsewhere, spark, source, target, shape, watch=watch, report=report)
    if not is_readable(state):
        with described(state, watch) as copy:
            made = rewrite_state(spark, copy, target, shape=shape, change_rows=change_rows, watch=watch, report=report)
        without_description(target, state)
        return made
    moves = change_rows is not None or shape.partitions != before.partitions
    progress = JobProgress(report)
    rewrite = _Rewrite(spark, state, target, shape, change_rows, progress, state.batch_id)
    if before.provider == HEAP and rewrite.written and (moves or shape.provider == HEAP):
        # Heap files hold only bytes; Spark's reader of RocksDB decodes the keys, which decide the partition.
        staged = target.sibling(".staged")
        staged.delete()
        try:
            by_way_of = StateShape(ROCKSDB, before.partitions)
            rewrite_state(spark, source, staged, shape=by_way_of, watch=watch, report=report)
            return rewrite_state(
                spark, staged, target, shape=shape, change_rows=change_rows, watch=watch, report=report
            )
        finally:
            staged.delete()
    return _carry_out(rewrite, state, watch, is_edit=change_rows is not None)


def _carry_out(
    rewrite: _Rewrite,
    frame: StoppedState,
    watch: Watch,
    *,
    is_edit: bool = False,
    plan: Mapping[str, Any] | None = None,
) -> Rewritten:
    rewrite_id, began, target, shape = str(uuid.uuid4()), time.monotonic(), rewrite.target, rewrite.shape
    try:
        write_skeleton(
            frame,
            target,
            shape,
            rewrite_id,
            watch,
            is_edit=is_edit,
            left_out=rewrite.copied,
            state=rewrite.source,
            plan=plan,
        )
        _write_rows(rewrite, watch)
        stores = _prove(rewrite, watch)
        target.folder.flush_all()
    except BaseException:
        target.delete()
        raise
    return Rewritten(target, frame.batch_id, rewrite_id, shape, stores, round(1000 * (time.monotonic() - began)))


def _grafted(
    spark: SparkSession,
    elsewhere: Rewriter | None,
    source: StoppedState,
    target: LiveDirectory,
    graft: Graft,
    *,
    watch: Watch,
    report: Report,
) -> Rewritten:
    made = StoppedState.read(graft.state)
    for each in (source, made):
        if each.stored is not None and LIMIT in each.stored.operators:
            raise StateRewriteError(
                "The state of a limit is a counter that Spark's reader of state cannot read, so the state of this "
                "query cannot be migrated. Nothing was changed. Begin a new stream."
            )
    if made.stored is None:
        if source.stored is None:
            raise StateRewriteError(f"{source.live.url}: neither query keeps state. Nothing was changed.")
        shape = replace(source.stored.shape, checkpoint_format=1)
        rewrite = _Rewrite(spark, made, target, shape, None, JobProgress(report), source.batch_id)
        return _carry_out(rewrite, source, watch, plan=graft.plan)
    shape = made.stored.shape
    check_rewrite(made.stored, shape)
    if graft.rows and source.stored is not None and source.stored.shape != shape:
        raise StateRewriteError(
            f"The state ({source.stored.shape}) cannot be migrated: the session of the query keeps it as {shape}. "
            "Nothing was changed. Give the stream the settings of the state, and change these in a start of their own."
        )
    if elsewhere is not None:
        return _elsewhere(elsewhere, spark, source.live, target, shape, graft=graft, watch=watch, report=report)
    if not (is_readable(source) and is_readable(made)):
        with described(source, watch) as old, described(made, watch) as new:
            written = _grafted(
                spark, None, StoppedState.read(old), target, replace(graft, state=new), watch=watch, report=report
            )
        without_description(target, source, made)
        return written
    rewrite = _Rewrite(
        spark, made, target, shape, None, JobProgress(report), source.batch_id, source, graft.rows, graft.given
    )
    return _carry_out(rewrite, source, watch, plan=graft.plan)


def _elsewhere(
    rewriter: Rewriter,
    spark: SparkSession,
    source: LiveDirectory,
    target: LiveDirectory,
    shape: StateShape,
    *,
    graft: Graft | None = None,
    watch: Watch,
    report: Report,
) -> Rewritten:
    began = time.monotonic()
    answer = rewrite_elsewhere(rewriter, spark, source, target, shape, graft=graft, watch=watch, report=report)
    stores = {StateStoreName(*name): StoreDigest(rows, digest) for *name, rows, digest in answer["stores"]}
    took_ms = round(1000 * (time.monotonic() - began))
    return Rewritten(target, answer["batch_id"], answer["rewrite_id"], shape, stores, took_ms)


@dataclass(frozen=True)
class _Rewrite:
    spark: SparkSession
    source: StoppedState
    target: LiveDirectory
    shape: StateShape
    change_rows: RowChange | None
    progress: JobProgress
    batch_id: int
    # For a graft, from the state of the former query.
    former: StoppedState | None = None
    taken: Mapping[int, TakenRows] = field(default_factory=dict)
    given: Mapping[int, LiveDirectory] = field(default_factory=dict)

    @cached_property
    def copied(self) -> list[Operator]:
        """Operators whose files are copied, because Spark does not read the counter of a limit."""
        if not self.source.operators:
            return []
        is_same = replace(self.before, partitions=self.shape.partitions) == self.shape
        return [operator for operator in self.source.operators if is_same and operator.name == LIMIT]

    @property
    def written(self) -> list[Operator]:
        return [operator for operator in self.source.operators if operator not in self.copied]

    @property
    def before(self) -> StateShape:
        assert self.source.stored is not None
        return self.source.stored.shape

    @property
    def stores(self) -> list[tuple[Operator, StateStoreName]]:
        return [(operator, store) for operator in self.written for store in stores_of([operator])]

    def note(self, what: str, store: StateStoreName) -> None:
        stores = [each for _, each in self.stores]
        self.progress.step = f"{what} {store}, store {stores.index(store) + 1} of {len(stores)}"

    def partition_of(self, operator: Operator) -> Column:
        from pyspark.sql import functions as F

        if operator.single_partition:
            return F.lit(0)
        is_given = self.change_rows is not None or operator.number in self.given
        if not is_given and self.shape.partitions == self.before.partitions:
            # Heap state is converted without decoding its keys.
            return F.spark_partition_id()
        return F.pmod(F.hash(PARTITION_KEY), F.lit(self.shape.partitions))

    def rows(self, session: SparkSession, operator: Operator, store: StateStoreName) -> DataFrame:
        if operator.number in self.taken:
            return self.take(session, operator, store)
        given = self.given.get(operator.number)
        rows = rows_of(session, self.source, operator, store) if given is None else given_rows(session, given)
        if given is not None and operator.single_partition:
            rows = rows.drop(PARTITION_KEY)
        if self.change_rows is not None:
            rows = self.change_rows(store, rows)
        elif given is None and (operator.single_partition or self.shape.partitions == self.before.partitions):
            return rows
        if operator.single_partition:
            return rows.repartition(1)
        return rows.repartition(self.shape.partitions, PARTITION_KEY)

    def take(self, session: SparkSession, operator: Operator, store: StateStoreName) -> DataFrame:
        """Take each row in the partition where it was, as keys stay as they are."""
        taken = self.taken[operator.number]
        assert self.former is not None
        was = next(each for each in self.former.operators if each.number == taken.operator)
        if (was.stores, was.single_partition) != (operator.stores, operator.single_partition):
            raise StateRewriteError(
                f"Operator {operator.number} ({operator.name}) of the new code keeps its state in other stores than "
                f"the former operator {was.number} ({was.name}). Nothing was changed. Use bootstrap_state."
            )
        name = StateStoreName(was.number, was.name, store.store)
        return with_values(rows_of(session, self.former, was, name), taken)


def given_rows(session: SparkSession, place: LiveDirectory) -> DataFrame:
    return session.read.parquet(place.spark_location)


def _write_rows(rewrite: _Rewrite, watch: Watch) -> None:
    source, target, shape = rewrite.source, rewrite.target, rewrite.shape
    write = _write_to_heap if shape.provider == HEAP else _write_with_spark
    ids: StateIds = {}
    if rewrite.written:
        what = f"rewrite state as {shape}: {target.url}"
        ids = in_job_group(rewrite.spark.sparkContext, what, partial(write, rewrite), watch, rewrite.progress)
    copied = copy_operators(source, target, shape, rewrite.copied, watch)
    if shape.checkpoint_format == 2:
        write_state_ids(target, rewrite.batch_id, {**ids, **copied})


def _write_with_spark(rewrite: _Rewrite) -> StateIds:
    reading = state_session(rewrite.spark, rewrite.before)
    operators = {operator.number: operator for operator in rewrite.written}

    def rows_of_store(number: int, store: str) -> DataFrame:
        operator = operators[number]
        name = StateStoreName(number, operator.name, store)
        rewrite.note("writing", name)
        return rewrite.rows(reading, operator, name)

    return run_rewriter(rewrite.spark, rewrite.target, rewrite.batch_id, rewrite.shape, rows_of_store)


def _write_to_heap(rewrite: _Rewrite) -> StateIds:
    reading = state_session(rewrite.spark, rewrite.before)
    for operator, store in rewrite.stores:
        rewrite.note("writing", store)
        rows = rewrite.rows(reading, operator, store)
        HeapStore(rewrite.target.folder, operator.number, store.store, rewrite.batch_id + 1).write(rows)
    return {}


def _prove(rewrite: _Rewrite, watch: Watch) -> Mapping[StateStoreName, StoreDigest]:
    from pyspark.sql import functions as F

    if not rewrite.source.operators:
        return {}
    made = StoppedState.read(rewrite.target)
    check_directories(made, rewrite.shape.partitions)
    if not rewrite.written:
        return {}
    sessions = state_session(rewrite.spark, rewrite.before), state_session(rewrite.spark, rewrite.shape)
    before, after = (
        partial(rows_of, session, state) for session, state in zip(sessions, (rewrite.source, made), strict=True)
    )

    def wanted(operator: Operator, store: StateStoreName) -> tuple[DataFrame, Column]:
        rewrite.note("comparing", store)
        if operator.number in rewrite.taken:
            rows = rewrite.take(sessions[0], operator, store)
            return rows, F.lit(0) if operator.single_partition else F.spark_partition_id()
        given = rewrite.given.get(operator.number)
        rows = before(operator, store) if given is None else given_rows(sessions[0], given)
        if rewrite.change_rows is not None:
            rows = rewrite.change_rows(store, rows)
        return rows, rewrite.partition_of(operator)

    what = f"compare rewritten state: {rewrite.target.url}"
    compare = partial(compare_rows, rewrite.stores, wanted, after)
    return in_job_group(rewrite.spark.sparkContext, what, compare, watch, rewrite.progress)
