"""Batches that run again as they were planned: those lost with a live directory, and one that an operator debugs.

If the live directory is lost, a snapshot has the state after batch N and sinks have the batches up to M, which a query
that continues after N would divide differently. So a start runs N+1 to M again with their offsets from the journal
(`catalog/journal.py`), discards the rows, and continues after M: no sink is rolled back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Never

from dagster_ckpt.catalog.event_log import log_message
from dagster_ckpt.catalog.journal import PlannedBatch
from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.errors import CkptError, LiveDirectoryError, OptionError, RestoreError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.memory import MemoryFileIO
from dagster_ckpt.recovery.live_directories import restore_into, snapshot_location
from dagster_ckpt.recovery.plan import RecoveryFacts, RecoveryPlan, Restore, RestoreAndReplay
from dagster_ckpt.sinks.registry import described_sink, sinks_of
from dagster_ckpt.sinks.sink import OnRepeat, Sink, distinct, newest_batch
from dagster_ckpt.snapshot.store import read_files
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id, retained_batches
from dagster_ckpt.spark.checkpoint_dir.layout import BEFORE_THE_FIRST_BATCH, METADATA, OFFSETS, SOURCES, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import query_metadata
from dagster_ckpt.spark.checkpoint_dir.operators import widen_schemas
from dagster_ckpt.spark.checkpoint_dir.planned_batches import plan_again, planned_by, read_plan
from dagster_ckpt.spark.checkpoint_dir.restore import Watch, clone
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.spark.query.trial_batch import run_trial
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import sinks_of_snapshot, sinks_written
from dagster_ckpt.stream.lease import LeaseKeeper
from dagster_ckpt.stream.ownership import claim_live_folder
from dagster_ckpt.stream.snapshots import describe_snapshot
from dagster_ckpt.values.durations import monotonic_ms

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

# A longer batch ends the replay.
_BATCH_S = 3_600.0


@dataclass(frozen=True)
class LostBatches:
    """Batches after a snapshot that can be replayed exactly.

    Attributes:
        batches: Those that the query had committed, or that a sink has as a whole; empty if only
            the one in flight is left.
        in_flight: The next batch, if it was planned: the query runs it first.
    """

    restore: Restore
    batches: tuple[PlannedBatch, ...]
    query_id: str
    in_flight: PlannedBatch | None = None

    @property
    def last(self) -> int:
        if self.batches:
            return self.batches[-1].batch_id
        return self.in_flight.batch_id - 1 if self.in_flight is not None else -1

    def plan(self, directory: str | None = None) -> RestoreAndReplay:
        plan = self.restore
        if not self.batches:
            what = f"run batch {self.last + 1} as planned before"
        elif len(self.batches) == 1:
            what = f"replay batch {self.last} as planned before, without output"
        else:
            what = f"replay batches {self.batches[0].batch_id} to {self.last} as planned before, without output"
        return RestoreAndReplay(
            restore=plan,
            reason=f"{plan.reason}; {what}",
            from_batch=max(self.last, plan.from_batch or 0),
            to_batch=self.last,
            directory=directory,
            query_id=self.query_id,
            in_flight=self.in_flight.batch_id if self.in_flight is not None else None,
        )


def lost_batches(
    stream: StreamHandle, facts: RecoveryFacts, plan: RecoveryPlan, output: NamedOutput | None = None
) -> LostBatches | None:
    if (
        not isinstance(plan, Restore)
        or not facts.start_from.chooses_its_point
        or plan.snapshot.batch_id is None
        or not stream.options.max_replayed_batches
        # Such a sink is rolled back, as its log no longer lists these rows.
        or facts.damaged_logs
        # They may have read rows that were undone upstream.
        or facts.undone.went_back
    ):
        return None
    snapshot = plan.snapshot
    planned = stream.catalog.journal.after(stream.stream_id, plan.snapshot.batch_id)
    sinks = distinct(sinks_of([*sinks_of_snapshot(stream, snapshot), *sinks_written(stream)]))
    sink = described_sink(output)
    if not planned or (sink is not None and not sink.is_among(sinks)):
        return None
    newest = planned[-1]
    # Under the snapshot's id, sinks may know undone batches of an earlier rewind to it.
    query_id = planned_by(newest)
    if query_id is None:
        return None
    had = [
        newest.batch_id if newest.is_committed else newest.batch_id - 1,
        *(_newest_whole(sink, query_id) for sink in sinks),
    ]
    if facts.live_batch is not None:
        had.append(facts.live_batch)
    batches = tuple(batch for batch in planned if batch.batch_id <= max(had))
    in_flight = next(iter(planned[len(batches) :]), None)
    is_in_part = in_flight is not None and any(
        _has_parts(sink) and _newest_whole(sink, query_id) == in_flight.batch_id - 1 for sink in sinks
    )
    if not (batches or is_in_part) or len(batches) > stream.options.max_replayed_batches:
        return None
    return LostBatches(plan, batches, query_id, in_flight)


def replay(
    stream: StreamHandle,
    lost: LostBatches,
    lease: LeaseKeeper,
    describe: Callable[[], DataStreamWriter],
    *,
    watch: Watch,
) -> RestoreAndReplay:
    """Run lost batches without output, on a snapshot restored to a directory that no stream uses."""

    def stopped() -> bool:
        watch()
        return False

    plan = lost.restore
    claim_live_folder(stream)
    generation = stream.catalog.streams.get(stream.stream_id).live_generation
    live = stream.new_live_directory(generation, lease.record.token).sibling(".replayed")
    started_ms = monotonic_ms()
    try:
        restore_into(stream, snapshot_location(plan.snapshot), live, donor=plan.donor, marked=True, watch=watch)
        # As each start does.
        widen_schemas(live.folder, plan.snapshot.batch_id or 0, nullcontext)
        for batch in lost.batches:
            plan_again(live, batch)
            trial = run_trial(
                describe, live, f"{stream.name} replay", replays=True, timeout_s=_BATCH_S, interrupted=stopped
            )
            if trial.batch_id == batch.batch_id and None not in (trial.rows, batch.rows) and trial.rows != batch.rows:
                raise RestoreError(
                    f"Batch {batch.batch_id} after {describe_snapshot(plan.snapshot)} could not be replayed: it read "
                    f"{batch.rows} rows when it ran first, and {trial.rows} now. Its input changed or is gone."
                )
            if trial.batch_id != batch.batch_id:
                raise RestoreError(
                    f"Batch {batch.batch_id} after {describe_snapshot(plan.snapshot)} could not be replayed: "
                    f"{trial.error or 'Spark did not run it'}"
                )
        if lost.in_flight is not None:
            plan_again(live, lost.in_flight)
    except BaseException:
        live.delete()
        raise
    if lost.batches:
        log_message(
            stream.stream_id,
            f"replayed {len(lost.batches)} batches after batch {plan.to_batch}, up to {lost.last}, as they were "
            f"planned before, in {(monotonic_ms() - started_ms) / 1000:,.1f} s: the sinks keep the rows that they have",
        )
    return lost.plan(live.url)


def _newest_whole(sink: Sink, query_id: str) -> int:
    """Return the newest batch of which a sink certainly has all rows, or -1."""
    try:
        newest = newest_batch(sink, query_id)
    except CkptError:
        return -1
    if newest is None:
        return -1
    return newest - 1 if _has_parts(sink) else newest


def _has_parts(sink: Sink) -> bool:
    """Whether a sink may have part of a batch: of several writers into Kafka, some may have been killed."""
    return sink.has_parts or (sink.on_repeat is OnRepeat.RUNS and not sink.rolls_back)


@dataclass(frozen=True)
class ReplayPoint:
    """A state in `live` or `snapshot`, or none before the first batch, with the batches up to the one to replay.

    Attributes:
        after: The batch of the state; -1 is before the first.
    """

    after: int
    batches: tuple[PlannedBatch, ...]
    live: LiveDirectory | None = None
    snapshot: SnapshotRecord | None = None

    @property
    def batch(self) -> PlannedBatch:
        return self.batches[-1]

    def __str__(self) -> str:
        if self.snapshot is not None:
            return describe_snapshot(self.snapshot)
        return f"the live directory at batch {self.after}" if self.live is not None else "the beginning of the stream"

    def restore(self, stream: StreamHandle, target: LiveDirectory) -> None:
        """Build the state in a temporary directory; LiveDirectoryError if the live directory lacks it by now."""
        if self.snapshot is not None:
            restore_into(stream, snapshot_location(self.snapshot), target, is_scratch=True)
        elif self.live is not None:
            clone(self.live, target, at_batch=self.after, is_scratch=True)
        else:
            target.folder.make()
            target.folder.place(METADATA, [query_metadata(planned_by(self.batch) or "")])
            return
        # As a start does.
        widen_schemas(target.folder, self.after, nullcontext)


def replay_points(stream: StreamHandle, batch_id: int) -> Iterator[ReplayPoint]:
    """Yield the points to replay a batch from, nearest first; RestoreError if no state or plan is left for it."""
    if batch_id < 0:
        raise OptionError(f"batch is {batch_id}, but batches are numbered from 0.")
    plans = _Plans.of(stream)
    found, leads = False, deque[PlannedBatch]()
    for number in range(batch_id, BEFORE_THE_FIRST_BATCH, -1):
        plan = plans.plan(number)
        if plan is None:
            break
        leads.appendleft(plan)
        for point in plans.states_after(number - 1):
            found = True
            yield replace(point, batches=tuple(leads))
    if not found:
        plans.refuse(batch_id)


@dataclass(frozen=True)
class _Plans:
    stream: StreamHandle
    live: LiveDirectory | None
    retained: Collection[int]
    snapshots: Mapping[int, SnapshotRecord]

    @staticmethod
    def of(stream: StreamHandle) -> _Plans:
        url = stream.catalog.streams.get(stream.stream_id).live_directory
        live = LiveDirectory(url) if url is not None else None
        # Of two snapshots of a batch, the newer one.
        listed = reversed(stream.catalog.snapshots.restorable(stream.stream_id))
        snapshots = {each.batch_id: each for each in listed if each.batch_id is not None}
        return _Plans(stream, live, retained_batches(live) if live is not None else (), snapshots)

    def states_after(self, batch_id: int) -> Iterator[ReplayPoint]:
        if batch_id in self.retained:
            yield ReplayPoint(batch_id, (), live=self.live)
        if batch_id in self.snapshots:
            yield ReplayPoint(batch_id, (), snapshot=self.snapshots[batch_id])
        if batch_id == BEFORE_THE_FIRST_BATCH:
            yield ReplayPoint(batch_id, ())

    def plan(self, batch_id: int) -> PlannedBatch | None:
        journaled = self.stream.catalog.journal.of_batch(self.stream.stream_id, batch_id)
        return journaled or self._in_live(batch_id) or self._in_snapshot(batch_id)

    def _in_live(self, batch_id: int) -> PlannedBatch | None:
        # A fence is in the offset log, but is no plan.
        if self.live is None or batch_id == self.live.fenced_at():
            return None
        return _read(self.live.folder, batch_id)

    def _in_snapshot(self, batch_id: int) -> PlannedBatch | None:
        snapshot = self.snapshots.get(batch_id)
        if snapshot is None:
            return None
        files = MemoryFileIO(snapshot_location(snapshot))
        wanted = (METADATA, f"{OFFSETS}/", f"{SOURCES}/")
        for path, data in read_files(self.stream.store, files.url, lambda path: path.startswith(wanted)).items():
            files.write(path, [data])
        return _read(files, batch_id)

    def refuse(self, batch_id: int) -> Never:
        stream_id = self.stream.stream_id
        journaled = self.stream.catalog.journal.newest(stream_id)
        newest = max([*self.retained, *self.snapshots, *([journaled] if journaled is not None else [])], default=None)
        if newest is None or batch_id > newest:
            known = "none is known" if newest is None else f"the newest is {newest}"
            raise OptionError(
                f"Stream {stream_id!r} has not planned batch {batch_id} yet: {known}. Name an earlier one."
            )
        kept = f"has batches {min(self.retained)} to {max(self.retained)}" if self.retained else "is gone"
        older = ", ".join(str(each) for each in sorted(self.snapshots, reverse=True) if each < batch_id)
        raise RestoreError(
            f"Batch {batch_id} of stream {stream_id!r} cannot be replayed: the live directory {kept}, snapshots before "
            f"it are {f'at batches {older}' if older else 'gone'}, and nothing records the offsets of the batches "
            "between: the journal begins at the oldest checkpoint. Name a later batch; to keep more, retain more "
            "checkpoints (num_retained)."
        )


def _read(folder: FileIO, batch_id: int) -> PlannedBatch | None:
    with suppress(LiveDirectoryError, FileNotFoundError):
        return read_plan(folder, batch_id)
    return None


def query_of(point: ReplayPoint) -> str | None:
    named = planned_by(point.batch)
    return named if named is not None or point.live is None else live_query_id(point.live)


def sources_of(point: ReplayPoint) -> Iterator[tuple[str, bytes]]:
    for batch in point.batches:
        yield from ((path, data) for path, data in batch.files.items() if path.startswith(f"{SOURCES}/"))
