"""From where one batch can be replayed: the state before it, and the plans of the batches up to it.

A plan is in the journal, in the offset log of the live directory, or in a snapshot taken then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Never

from dagster_ckpt.catalog.journal import PlannedBatch
from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.errors import LiveDirectoryError, OptionError, RestoreError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.memory import MemoryFileIO
from dagster_ckpt.recovery.live_directories import restore_into, snapshot_location
from dagster_ckpt.snapshot.store import read_files
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id, retained_batches
from dagster_ckpt.spark.checkpoint_dir.layout import METADATA, OFFSETS, SOURCES, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import query_metadata
from dagster_ckpt.spark.checkpoint_dir.operators import widen_schemas
from dagster_ckpt.spark.checkpoint_dir.planned_batches import planned_by, read_plan
from dagster_ckpt.spark.checkpoint_dir.restore import clone
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import describe_snapshot

BEFORE_THE_FIRST = -1


@dataclass(frozen=True)
class ReplayPoint:
    """State that exists, and the plans that lead from it to a batch.

    Attributes:
        after: The state's batch; -1 is before the first.
        batches: The plans of all later ones up to the batch to replay.
        live: The live directory, if that has the state; else `snapshot` has it, or there is none before the first
            batch.
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
        """Build the state in a temporary directory; LiveDirectoryError if the live directory no longer has it."""
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
    """Nearest first; RestoreError if no state before it is left, or the plans between are not recorded."""
    if batch_id < 0:
        raise OptionError(f"batch is {batch_id}, but batches are numbered from 0.")
    plans = _Plans.of(stream)
    found, leads = False, deque[PlannedBatch]()
    for number in range(batch_id, BEFORE_THE_FIRST, -1):
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
        # Of two at one batch the newer.
        listed = reversed(stream.catalog.snapshots.restorable(stream.stream_id))
        snapshots = {each.batch_id: each for each in listed if each.batch_id is not None}
        return _Plans(stream, live, retained_batches(live) if live is not None else (), snapshots)

    def states_after(self, batch_id: int) -> Iterator[ReplayPoint]:
        if batch_id in self.retained:
            yield ReplayPoint(batch_id, (), live=self.live)
        if batch_id in self.snapshots:
            yield ReplayPoint(batch_id, (), snapshot=self.snapshots[batch_id])
        if batch_id == BEFORE_THE_FIRST:
            yield ReplayPoint(batch_id, ())

    def plan(self, batch_id: int) -> PlannedBatch | None:
        journaled = self.stream.catalog.journal.of_batch(self.stream.stream_id, batch_id)
        return journaled or self._in_live(batch_id) or self._in_snapshot(batch_id)

    def _in_live(self, batch_id: int) -> PlannedBatch | None:
        # A fence has the number of a plan, and is none.
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
    # An entry that is missing or unreadable may be elsewhere.
    with suppress(LiveDirectoryError, FileNotFoundError):
        return read_plan(folder, batch_id)
    return None


def query_of(point: ReplayPoint) -> str | None:
    """The id of the query that ran the batch, by which sinks know it."""
    named = planned_by(point.batch)
    return named if named is not None or point.live is None else live_query_id(point.live)


def sources_of(point: ReplayPoint) -> Iterator[tuple[str, bytes]]:
    for batch in point.batches:
        yield from ((path, data) for path, data in batch.files.items() if path.startswith(f"{SOURCES}/"))
