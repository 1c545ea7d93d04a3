"""Repairs and cleans the outputs of file sinks.

A file that the log does not name may still be needed: by a batch being written, or by a snapshot whose copy of the log
names it, because a start from there makes it visible again. The folder may also have files of batch jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.pending_restore import SinkRollBack
from dagster_ckpt.catalog.records import EventRecord, EventType, SnapshotRecord
from dagster_ckpt.errors import CkptError, SharedSinkError, SinkRollbackError, StorageAccessError
from dagster_ckpt.io.location import open_file_io, same_folder
from dagster_ckpt.recovery.sink_survey import refuse_to_clean
from dagster_ckpt.sinks.file_sink import FileSink, Leftovers, PartFile
from dagster_ckpt.sinks.file_sink_log import committed_files, log_entries, needed_entries
from dagster_ckpt.sinks.file_sink_repair import (
    LogTrouble,
    RebuiltLog,
    Relocation,
    is_intact,
    log_trouble,
    plan_rebuilt_log,
    plan_relocation,
    rebuild_log,
    relocate,
)
from dagster_ckpt.sinks.registry import logs_in_snapshot, part_files_in_snapshot, sinks_of
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import sinks_written
from dagster_ckpt.stream.lease import LeaseKeeper, acquire_for
from dagster_ckpt.stream.liveness import Liveness, holder_liveness, is_held
from dagster_ckpt.stream.ownership import fence_predecessor
from dagster_ckpt.stream.snapshots import describe_snapshot, holding

DEFAULT_GRACE_MS = 24 * 3_600_000
# Files undone by earlier rewinds are attributed to the first of these.
_MAX_REWINDS = 1000


@dataclass(frozen=True)
class Orphan:
    """A part file that the sink's log does not name.

    Attributes:
        age_ms: None if the file system does not report it.
        undone_by: The rewind that undid it, or that a failed attempt left it.
    """

    sink: str
    file: PartFile
    age_ms: int | None
    undone_by: str
    kept_because: str | None

    @property
    def is_removable(self) -> bool:
        return self.kept_because is None


@dataclass(frozen=True)
class SinkCleaning:
    orphans: tuple[Orphan, ...]
    deleted: bool

    @property
    def removable(self) -> tuple[Orphan, ...]:
        return tuple(orphan for orphan in self.orphans if orphan.is_removable)

    @property
    def bytes(self) -> int:
        return sum(orphan.file.size for orphan in self.removable)


def clean_sinks(stream: StreamHandle, *, dry_run: bool = True, grace_ms: int | None = None) -> SinkCleaning:
    """Carry out `Client.clean_sinks`; ages are by the clock of each sink's storage."""
    grace_ms = DEFAULT_GRACE_MS if grace_ms is None else grace_ms
    refuse_to_clean(stream)
    sinks = sinks_of(stream.catalog.executions.last_sinks(stream.stream_id))
    # List files before reading logs and snapshots, so that none that these name by then is an orphan.
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
    """Whether a process may be writing, even after its lease has expired."""
    lease = stream.catalog.leases.current(stream.stream_id)
    return lease is not None and holder_liveness(lease) is not Liveness.ENDED


def _of_a_batch_job(file: PartFile, leftovers: Leftovers, uuids: Mapping[str | None, int]) -> str | None:
    folders = map(str, PurePosixPath(file.path).parents)
    folder = next((each for each in folders if each in leftovers.batch_folders), None)
    if folder is not None:
        where = "this folder" if folder == "." else f"its folder {folder}"
        return f"a batch job has written to {where}, which has a file _SUCCESS, and its files have such names as well"
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
    folders = [sink.folder for sink in sinks_of(sinks_written(stream)) if isinstance(sink, FileSink)]
    for folder in folders:
        _refuse_wrong_list(stream, folder)
    return sorted(path for folder in folders for path in committed_files(folder))


def _refuse_wrong_list(stream: StreamHandle, folder: str) -> None:
    record = stream.catalog.streams.get(stream.stream_id)
    # Read this before the log, to which a running query writes first.
    committed = _committed(stream)
    if committed is None:
        committed = stream.catalog.executions.last_batch(stream.stream_id, record.live_directory)
    what = f"The files of stream {stream.stream_id!r} in {folder} are not listed"
    if isinstance(record.pending_restore, SinkRollBack):
        raise SinkRollbackError(
            f"{what}: the stream went back, and its log still lists what the next start undoes. Start it first."
        )
    if log_trouble(folder) is LogTrouble.ELSEWHERE:
        raise SinkRollbackError(
            f"{what}: its log lists files that do not lie there, so it was moved or copied. Run `dagster-ckpt "
            f"relocate-output {folder}`, which lets the log list the files that are there."
        )
    if committed is not None and _is_incomplete(folder, committed):
        raise SinkRollbackError(
            f"{what}: its log is missing, incomplete or damaged, and with it the files of some batches. Run "
            f"`dagster-ckpt rebuild-output {stream.stream_id}`, which writes the log again from the snapshots that "
            "captured it; or put it back from a backup."
        )


def relocate_output(catalog: Catalog, folder: str, *, dry_run: bool = False) -> Relocation:
    sink = FileSink.at(folder)
    for stream in catalog.streams.all():
        writes = sink.is_among(sinks_of(catalog.executions.last_sinks(stream.stream_id)))
        if writes and is_held(catalog.leases.current(stream.stream_id)):
            raise SharedSinkError(
                f"The log of {folder} is not relocated: stream {stream.stream_id!r} is running and writes there. "
                "Suspend it first."
            )
    planned = plan_relocation(folder)
    if not dry_run:
        relocate(planned)
    return planned


@dataclass(frozen=True)
class RebuiltOutput:
    """Result of `Client.rebuild_output_logs` for one folder.

    Attributes:
        unknown: Batches committed since `batch_id`, whose files no log lists.
    """

    folder: str
    batch_id: int
    source: SnapshotRecord
    unknown: range

    def messages(self) -> list[str]:
        first = f"{self.folder}: its log lists the files of all batches up to {self.batch_id}"
        if not self.unknown:
            return [f"{first}; the stream can go on"]
        number = self.source.label or self.source.snapshot_id
        return [
            first,
            f"{self.folder}: no snapshot has captured batches {self.unknown.start} to {self.unknown.stop - 1}, so the "
            f"files of their rows are unknown. Start from {describe_snapshot(self.source)} (--from {number}): the "
            "query runs these batches again",
        ]


def rebuild_output_logs(stream: StreamHandle, *, dry_run: bool = False, origin: str) -> list[RebuiltOutput]:
    folders = [sink.folder for sink in sinks_of(sinks_written(stream)) if isinstance(sink, FileSink)]
    broken = [folder for folder in folders if _is_incomplete(folder, _committed(stream))]
    planned = [_plan(stream, folder) for folder in broken]
    if dry_run or not planned:
        return [result for _, result in planned]
    acquired = acquire_for(stream.catalog, stream.stream_id, "rebuild-output", origin)
    with LeaseKeeper(stream.catalog, acquired.record) as lease:
        fence_predecessor(stream, acquired, still_mine=lease.check)
        # The query may have run until it was fenced.
        planned = [_plan(stream, folder) for folder in broken]
        with holding(stream.catalog, [result.source for _, result in planned], "rebuilding the log of an output"):
            for rebuilt, _ in planned:
                rebuild_log(rebuilt, lease.step)
    return [result for _, result in planned]


def _plan(stream: StreamHandle, folder: str) -> tuple[RebuiltLog, RebuiltOutput]:
    source, captured = _captured(stream, folder)
    rebuilt = plan_rebuilt_log(folder, captured, _committed(stream))
    return rebuilt, RebuiltOutput(folder, rebuilt.batch_id, source, rebuilt.unknown)


def _is_incomplete(folder: str, committed: int | None) -> bool:
    there = open_file_io(folder)
    names = log_entries(there)
    last = max(names, default=None)
    if last is None or (committed is not None and last < committed) or log_trouble(folder) is LogTrouble.GAP:
        return True
    return not all(is_intact(there, names[number]) for number in needed_entries(names))


def _committed(stream: StreamHandle) -> int | None:
    live = stream.catalog.streams.get(stream.stream_id).live_directory
    return LiveDirectory(live).positions().commit if live is not None else None


def _captured(stream: StreamHandle, folder: str) -> tuple[SnapshotRecord, list[SinkEntry]]:
    for snapshot in stream.catalog.snapshots.restorable(stream.stream_id):
        try:
            logs = logs_in_snapshot(stream.store, snapshot.location or "")
        except StorageAccessError:
            raise
        except CkptError:
            # Damaged: try an older one.
            continue
        entries = next((entries for place, entries in logs.items() if same_folder(place, folder)), None)
        if entries:
            return snapshot, entries
    raise SinkRollbackError(
        f"The log of {folder} is not rebuilt, nothing was changed: no snapshot of stream {stream.stream_id!r} has "
        "captured it. Put it back from a backup, or write to a new folder."
    )
