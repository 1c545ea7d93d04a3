"""Part files of file sinks: those that the log names, and those that it no longer names, which are deleted.

Two things may still need a file that the log does not name: a batch being written, and a snapshot
whose copy of the log names it, since a start from there makes it visible again. A forked output has
its own files. Files that a batch job has written to the same folder are not the stream's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dagster_ckpt.catalog.records import EventRecord, EventType
from dagster_ckpt.recovery.sink_survey import refuse_to_clean
from dagster_ckpt.sinks.file_sink import FileSink, Leftovers, PartFile
from dagster_ckpt.sinks.file_sink_log import committed_files
from dagster_ckpt.sinks.registry import sinks_of
from dagster_ckpt.sinks.snapshot_sinks import part_files_in_snapshot
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import sinks_written
from dagster_ckpt.stream.liveness import Liveness, holder_liveness
from dagster_ckpt.stream.snapshots import describe_snapshot

DEFAULT_GRACE_MS = 24 * 3_600_000
# A file undone by a rollback earlier than these is reported as undone by the first of them.
_MAX_REWINDS = 1000


@dataclass(frozen=True)
class Orphan:
    """A part file that the log of its sink does not name.

    Attributes:
        sink: Folder of the sink.
        file: The file.
        age_ms: How long ago it was written, or None if the file system does not report it.
        undone_by: The rollback that removed it from the log, or that a failed attempt left it.
        kept_because: Why it must not be deleted (yet), or None.
    """

    sink: str
    file: PartFile
    age_ms: int | None
    undone_by: str
    kept_because: str | None

    @property
    def is_removable(self) -> bool:
        """Whether nothing can need it."""
        return self.kept_because is None


@dataclass(frozen=True)
class SinkCleaning:
    """What was found, and what was done.

    Attributes:
        orphans: Files that no log names.
        deleted: Whether the removable ones were deleted.
    """

    orphans: tuple[Orphan, ...]
    deleted: bool

    @property
    def removable(self) -> tuple[Orphan, ...]:
        """The files that nothing can need."""
        return tuple(orphan for orphan in self.orphans if orphan.is_removable)

    @property
    def bytes(self) -> int:
        """Total size of the removable files."""
        return sum(orphan.file.size for orphan in self.removable)


def clean_sinks(
    stream: StreamHandle,
    *,
    dry_run: bool = True,
    grace_ms: int | None = None,
) -> SinkCleaning:
    """List, and without `dry_run` delete, part files of a stream's file sinks that nothing names.

    Ages are measured by the clock of each sink's storage, never by this machine's.

    Args:
        stream: The stream; it may be running.
        dry_run: Only list.
        grace_ms: Younger files are kept. Default: one day.

    Raises:
        StreamNotFoundError: The stream was never started.
        SharedSinkError: A folder no longer belongs to the stream, or its log is missing.
        SinkRollbackError: A sink has no complete log, so its files cannot be judged.
        LiveDirectoryError: A log has a gap, or an entry cannot be read.
        SnapshotCorruptError: A snapshot cannot be read, so the files it names are unknown.
        StorageAccessError: A sink or a snapshot cannot be reached.
    """
    grace_ms = DEFAULT_GRACE_MS if grace_ms is None else grace_ms
    refuse_to_clean(stream)
    sinks = sinks_of(stream.catalog.executions.last_sinks(stream.stream_id))
    # Of each sink, files are listed first, then its log is read.
    found = [(sink, sink.leftovers()) for sink in sinks if isinstance(sink, FileSink)]
    in_snapshots = _named_in_snapshots(stream)
    rewinds = _rewinds(stream)
    may_write = _may_be_writing(stream)
    orphans: list[Orphan] = []
    for sink, leftovers in found:
        unlisted = [file for file in leftovers.files if file.name not in leftovers.log.names]
        uuids = Counter(file.uuid for file in leftovers.files)
        theirs = [
            Orphan(
                sink.place or sink.name,
                file,
                age_ms=_age_ms(file, leftovers.now_ms),
                undone_by=_undone_by(file, rewinds),
                kept_because=in_snapshots.get(file.name)
                or _of_a_batch_job(file, leftovers, uuids)
                or _too_young(file, leftovers, may_write, grace_ms),
            )
            for file in unlisted
        ]
        orphans += theirs
        if not dry_run:
            sink.delete_leftovers([each.file for each in theirs if each.is_removable])
    return SinkCleaning(tuple(orphans), deleted=not dry_run)


def _age_ms(file: PartFile, now_ms: int | None) -> int | None:
    return None if file.modified_at_ms is None or now_ms is None else max(0, now_ms - file.modified_at_ms)


def _may_be_writing(stream: StreamHandle) -> bool:
    """Whether a query may write batches: even after its lease expired, unless it is proven to have ended."""
    lease = stream.catalog.leases.current(stream.stream_id)
    return lease is not None and holder_liveness(lease) is not Liveness.ENDED


def _of_a_batch_job(file: PartFile, leftovers: Leftovers, uuids: Mapping[str | None, int]) -> str | None:
    if leftovers.has_batch_job:
        return (
            "a batch job has written to this folder, which has a file _SUCCESS, and its files have such names as well"
        )
    if uuids[file.uuid] > 1:
        return "other files have the same uuid, so a batch job may have written it"
    return None


def _too_young(file: PartFile, leftovers: Leftovers, may_write: bool, grace_ms: int) -> str | None:
    age_ms, newest_ms = _age_ms(file, leftovers.now_ms), leftovers.log.newest_at_ms
    if file.modified_at_ms is None or age_ms is None:
        return "its age is unknown"
    if may_write and (newest_ms is None or file.modified_at_ms >= newest_ms):
        return "the running query may be writing it"
    if age_ms < grace_ms:
        return f"younger than the grace period of {grace_ms // 1000} s"
    return None


def _named_in_snapshots(stream: StreamHandle) -> dict[str, str]:
    """Names of the files that snapshots reference, with the snapshot that does."""
    named: dict[str, str] = {}
    for snapshot in stream.catalog.snapshots.completed(stream.stream_id):
        if snapshot.location is not None:
            named |= dict.fromkeys(
                part_files_in_snapshot(stream.store, snapshot.location), f"{describe_snapshot(snapshot)} refers to it"
            )
    return named


def _rewinds(stream: StreamHandle) -> list[EventRecord]:
    events = stream.catalog.events
    found = events.last_of([stream.stream_id], [EventType.RESTORED], up_to=events.latest_sequence(), each=_MAX_REWINDS)
    return found[stream.stream_id]


def _undone_by(file: PartFile, rewinds: Sequence[EventRecord]) -> str:
    written_ms = file.modified_at_ms
    after = next((each for each in rewinds if written_ms is not None and each.at_ms > written_ms), None)
    if after is None:
        return "no rollback: a failed or interrupted task left it"
    directory = str(after.payload.get("live_directory", "")).rsplit("/", 1)[-1]
    return f"the rewind that created {directory}"


def output_files(stream: StreamHandle) -> list[str]:
    """The files that a stream's file sinks have committed, as their logs list them: exactly the rows of the stream.

    Readers that do not follow the log (pandas, Polars, DuckDB) would also read the files of batches that a
    rewind has undone, and those of a batch that is being written. After a rewind, list the files again.

    Args:
        stream: The stream; it may be running.

    Returns:
        Local paths or URLs, sorted; empty if the stream writes to no file sink, or nothing yet.

    Raises:
        StreamNotFoundError: The stream was never registered.
        LiveDirectoryError: A log cannot be parsed.
        StorageAccessError: A sink cannot be reached.
    """
    folders = [sink.folder for sink in sinks_of(sinks_written(stream)) if isinstance(sink, FileSink)]
    return sorted(path for folder in folders for path in committed_files(folder))
