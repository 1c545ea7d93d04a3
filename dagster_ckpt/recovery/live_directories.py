"""A stream's directories: built for a start, temporary copies of its state, and deletion of those no longer needed.

A crash leaves only directories that no stream uses: see `prepare.py`.

Temporary copies are near the live directories, where every executor can reach them. While one is in use, a file next to
it gets the catalog's time; copies of killed processes have an old one.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_ckpt.catalog.records import EventType, SnapshotRecord, StateOrigin, StreamRecord
from dagster_ckpt.errors import (
    LeaseHeldError,
    LeaseLostError,
    RowsAtRiskError,
    SnapshotCorruptError,
    StreamNotFoundError,
)
from dagster_ckpt.io.file_io import no_op
from dagster_ckpt.io.location import same_folder
from dagster_ckpt.sinks.batch_in_flight import refuse_skipped_batch
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.writer import Progress
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import Donor, Filler, Watch, materialize
from dagster_ckpt.state.rewriting import Rewritten, rewrite_state
from dagster_ckpt.state.stopped_state import StateShape
from dagster_ckpt.stream.handle import BuiltDirectory, StreamHandle
from dagster_ckpt.stream.lease import AcquiredLease, LeaseKeeper, acquire_for, repeating
from dagster_ckpt.stream.ownership import (
    adopted_directory,
    disown_live_folder,
    lies_elsewhere,
    other_owner_of_live_folder,
    put_up_fence,
)
from dagster_ckpt.stream.snapshots import describe_snapshot
from dagster_ckpt.values.tracing import span

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_ckpt.recovery.state_migration import PlannedMigration

_MADE = 100


def delete_live_directories(stream: StreamHandle, acquired: AcquiredLease, lease: LeaseKeeper) -> str | None:
    """Delete a stream's live directories and forget the current one; return their folder if they are deleted.

    A directory elsewhere stays: it was adopted, or belongs to the original of a copied catalog. So does a folder that
    another deployment uses now. A previous holder that may be alive is fenced first. Fenced directories stay, or its
    query would keep writing.
    """
    record = stream.catalog.streams.get(stream.stream_id)
    if not acquired.predecessor_ended and not may_be_anothers(stream, record):
        put_up_fence(stream, acquired, still_mine=lease.check, is_followed=False)
    stream.catalog.streams.forget_live_directory(lease.record)
    _delete_live_directories(stream, record, lease, spares_fenced=not acquired.predecessor_ended)
    is_kept = lies_elsewhere(stream, record) or may_be_anothers(stream, record)
    return None if record.live_directory is None or is_kept else stream.live_folder


def delete_older_live_directories(stream: StreamHandle, current: LiveDirectory, lease: LeaseKeeper) -> None:
    """Delete live directories of earlier starts, but none of a successor, which has a higher token.

    The previous one stays while fenced, or a query that still runs there would plan batches.
    """
    built = _own_live_directories(stream, stream.catalog.streams.get(stream.stream_id))
    names = {each.live.url.rpartition("/")[2]: each for each in built}
    mine = names.get(current.url.rstrip("/").rpartition("/")[2])
    token = lease.record.token
    for each in built:
        of_this_run = each.token == token and mine is not None and each.generation < mine.generation
        is_before = mine is not None and each.generation == mine.generation - 1
        if each != mine and (each.token < token or of_this_run):
            if is_before and each.live.fenced_at() is not None:
                continue
            lease.check()
            each.live.delete()


def delete_forgotten_live_directories(stream: StreamHandle) -> str | None:
    """Delete what the last uploads of a JVM wrote after its live directory was deleted."""
    try:
        record = stream.catalog.streams.get(stream.stream_id)
    except StreamNotFoundError:
        return None
    if record.live_directory is not None or stream.catalog.leases.current(stream.stream_id) is not None:
        return None
    if not _own_live_directories(stream, record):
        return None
    try:
        # A concurrent start waits for this, or has a higher token and its own directories.
        acquired = acquire_for(stream.catalog, stream.stream_id, "housekeeping", "housekeeping")
    except LeaseHeldError:
        return None
    with LeaseKeeper(stream.catalog, acquired.record) as lease:
        try:
            return _delete_live_directories(stream, record, lease) if acquired.predecessor_ended else None
        except LeaseLostError:
            return None


def _delete_live_directories(
    stream: StreamHandle, record: StreamRecord, lease: LeaseKeeper, *, spares_fenced: bool = False
) -> str | None:
    built = [each.live for each in _own_live_directories(stream, record) if each.token <= lease.record.token]
    if spares_fenced:
        built = [live for live in built if live.fenced_at() is None]
    for live in built:
        lease.check()
        live.delete()
    if not stream.live_directories():
        disown_live_folder(stream)
    LiveDirectory(stream.live_folder).folder.delete_if_empty()
    return stream.live_folder if built else None


def _own_live_directories(stream: StreamHandle, record: StreamRecord) -> list[BuiltDirectory]:
    """Return none unless the catalog knows that the stream ran there: they may be another deployment's."""
    known = {record.live_directory} | {
        each.live_directory for each in stream.catalog.executions.of_stream(stream.stream_id)
    }
    events = stream.catalog.events
    made = events.last_of([stream.stream_id], [EventType.RESTORED], up_to=events.latest_sequence(), each=_MADE)
    known |= {event.payload.get("live_directory") for event in made.get(stream.stream_id, ())}
    is_own = any(isinstance(url, str) and _is_in(stream.live_folder, url) for url in known)
    return stream.live_directories() if is_own and other_owner_of_live_folder(stream) is None else []


def _is_in(folder: str, url: str) -> bool:
    return same_folder(folder, url.rstrip("/").rpartition("/")[0])


def may_be_anothers(stream: StreamHandle, record: StreamRecord) -> bool:
    if adopted_directory(record) is not None:
        return False
    return lies_elsewhere(stream, record) or other_owner_of_live_folder(stream) is not None


def left_to_another(stream: StreamHandle) -> str:
    record = stream.catalog.streams.get(stream.stream_id)
    if not lies_elsewhere(stream, record):
        return (
            f"the live directories in {stream.live_folder}: the folder belongs to deployment "
            f"{other_owner_of_live_folder(stream)} now"
        )
    return (
        f"the live directory {record.live_directory}: it is not below {stream.live_folder}, and belongs to another "
        "environment if this catalog is a copy. Otherwise delete it yourself"
    )


@dataclass(frozen=True)
class StateRewrite:
    """`shape` is None for a migration, which keeps it."""

    spark: SparkSession
    shape: StateShape | None
    report: Callable[[str], None] = lambda _message: None
    migration: PlannedMigration | None = None


class Building:
    def __init__(self, live: LiveDirectory, rewrite: StateRewrite | None, watch: Watch) -> None:
        self.live = live
        self.watch = watch
        self.rewritten: Rewritten | None = None
        self._rewrite = rewrite

    @property
    def rewrites(self) -> bool:
        return self._rewrite is not None

    @span("write_files")
    def fill(self, fill: Callable[[LiveDirectory], object]) -> None:
        """Let `fill` write the directory, or a temporary one whose state is then rewritten."""
        if self._rewrite is None:
            fill(self.live)
            return
        source = self.live.sibling(".source")
        try:
            fill(source)
            self.rewrite(source)
        finally:
            source.delete()

    def rewrite(self, source: LiveDirectory) -> None:
        """Rewrite the state of a directory in which no query runs."""
        rewrite = self._rewrite
        assert rewrite is not None
        made = rewrite.migration
        with (
            nullcontext()
            if made is None
            else made.graft(source, self.live.sibling(".made"), self.watch, rewrite.report) as graft
        ):
            self.rewritten = rewrite_state(
                rewrite.spark,
                source,
                self.live,
                shape=rewrite.shape,
                graft=graft,
                watch=self.watch,
                report=rewrite.report,
            )

    @property
    def plan(self) -> Mapping[str, Any] | None:
        return self._migration.after.as_record() if self._migration is not None else None

    def origin(self, origin: StateOrigin) -> StateOrigin:
        return origin.written_by(self._migration.before.as_record()) if self._migration is not None else origin

    @property
    def _migration(self) -> PlannedMigration | None:
        return self._rewrite.migration if self._rewrite is not None else None

    def check_in_flight(self, sinks: Sequence[str], *, roll_back_tables: bool) -> None:
        """If a sink would skip the batch in flight, whose state a rewrite drops, delete the directory and refuse."""
        if self.rewritten is None:
            return
        try:
            refuse_skipped_batch(self.live, sinks, roll_back_tables=roll_back_tables)
        except RowsAtRiskError:
            self.live.delete()
            raise


def restore_into(
    stream: StreamHandle,
    location: str,
    live: LiveDirectory,
    *,
    new_query_id: str | None = None,
    donor: Donor | None = None,
    is_scratch: bool = False,
    marked: bool = False,
    watch: Watch = no_op,
    progress: Progress | None = None,
) -> None:
    """Restore a snapshot to a new directory that no stream uses; every byte is compared with its digest.

    Args:
        new_query_id: Lets the query run alongside the original; None keeps the snapshot's.
        donor: A good live directory whose matching files are linked.
    """
    placed = itertools.count(1)
    total = stream.store.manifest(location).file_count if progress is not None else 0

    def fill(filler: Filler) -> None:
        def missing(entries: Iterable[FileEntry]) -> Iterable[FileEntry]:
            return filler.link_unchanged(entries, donor)

        def place(entry: FileEntry, chunks: Iterable[bytes]) -> None:
            filler(entry.path, chunks)
            if progress is not None:
                progress(next(placed), total)

        stream.store.extract(location, place, missing=missing)

    materialize(live, fill, new_query_id=new_query_id, is_whole=True, is_scratch=is_scratch, marked=marked, watch=watch)


def snapshot_location(snapshot: SnapshotRecord) -> str:
    if snapshot.location is None:
        raise SnapshotCorruptError(
            f"The catalog does not record the location of {describe_snapshot(snapshot)}. Start from its location "
            "instead, or from another snapshot."
        )
    return snapshot.location


# Stream ids cannot begin with a dot.
SCRATCH_FOLDER = ".scratch"
# A copy without a report for this long is deleted.
LEFT_AFTER_MS = 6 * 3_600_000
_REPORT_EVERY_S = 300.0
_IN_USE = ".in-use"


@contextmanager
def scratch_directory(stream: StreamHandle) -> Iterator[LiveDirectory]:
    remove_leftovers(stream)
    folder = _folder(stream)
    name = f"{stream.catalog.now_ms()}-{uuid.uuid4().hex[:8]}"
    scratch = folder.sibling(f"/{name}")

    def report() -> None:
        folder.folder.write(f"{name}{_IN_USE}", [str(stream.catalog.now_ms()).encode()])

    try:
        with repeating(report, every_s=_REPORT_EVERY_S, name=f"scratch-{stream.stream_id}"):
            yield scratch
    finally:
        scratch.delete()
        scratch.sibling(".partial").delete()
        folder.folder.delete(f"{name}{_IN_USE}")


def remove_leftovers(stream: StreamHandle) -> None:
    now_ms = stream.catalog.now_ms()
    folder = _folder(stream)
    for name, entry in folder.folder.list().items():
        made_at = name.partition("-")[0]
        if not entry.is_directory or not made_at.isdecimal():
            continue
        # Unfinished and rewritten copies have the same name with a suffix.
        in_use = f"{name.partition('.')[0]}{_IN_USE}"
        if now_ms - max(int(made_at), _reported_at(folder, in_use)) > LEFT_AFTER_MS:
            folder.sibling(f"/{name}").delete()
            folder.folder.delete(in_use)


def scratch_copies(stream: StreamHandle) -> list[LiveDirectory]:
    folder = _folder(stream)
    return [folder.sibling(f"/{name}") for name, entry in sorted(folder.folder.list().items()) if entry.is_directory]


def _reported_at(folder: LiveDirectory, in_use: str) -> int:
    try:
        return int(folder.folder.read(in_use))
    except (FileNotFoundError, ValueError):
        return 0


def _folder(stream: StreamHandle) -> LiveDirectory:
    return LiveDirectory(f"{stream.live_root.rstrip('/')}/{SCRATCH_FOLDER}/{stream.stream_id}")
