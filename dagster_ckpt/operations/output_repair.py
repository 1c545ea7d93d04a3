"""Repairs of the logs of file sinks: relocate one whose folder was moved, rebuild one that was lost from snapshots."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.errors import CkptError, SharedSinkError, SinkRollbackError, StorageAccessError
from dagster_ckpt.io.location import open_file_io, same_folder
from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.sinks.file_sink_damage import LogTrouble, log_trouble
from dagster_ckpt.sinks.file_sink_log import log_entries, needed_entries
from dagster_ckpt.sinks.file_sink_repair import (
    RebuiltLog,
    Relocation,
    is_intact,
    plan_rebuilt_log,
    plan_relocation,
    rebuild_log,
    relocate,
)
from dagster_ckpt.sinks.registry import sinks_of
from dagster_ckpt.sinks.snapshot_sinks import logs_in_snapshot
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.fencing import fence_predecessor
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import sinks_written
from dagster_ckpt.stream.lease import LeaseKeeper, acquire
from dagster_ckpt.stream.liveness import is_held, this_holder
from dagster_ckpt.stream.snapshots import describe_snapshot, holding


def relocate_output(catalog: Catalog, folder: str, *, dry_run: bool = False) -> Relocation:
    """Let the log of a file sink list the files that are in its folder, after the folder was moved or copied.

    Args:
        catalog: The catalog: no stream that writes to the folder may be running.
        folder: The folder.
        dry_run: Only find the files.

    Raises:
        SharedSinkError: A running stream writes there.
        SinkRollbackError: There is no log, or a file is not there. Nothing was changed.
        LiveDirectoryError: An entry of the log cannot be parsed.
        StorageAccessError: The folder cannot be reached.
    """
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
    """What became of the log of one folder.

    Attributes:
        folder: The folder.
        batch_id: The newest batch that its log now lists.
        source: The snapshot that had captured it.
        unknown: Batches that the query has committed since, whose files nothing lists.
    """

    folder: str
    batch_id: int
    source: SnapshotRecord
    unknown: range

    def messages(self) -> list[str]:
        """The result in one or two sentences."""
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
    """Rebuild the lost or incomplete logs of a stream's file sinks from the snapshots that captured them.

    Each entry is the one that Spark wrote. Every file that the rebuilt log lists must be there with its length.

    Args:
        stream: The stream; it must not be running.
        dry_run: Only say what would be rebuilt.
        origin: Who requests it, as shown by the lease.

    Returns:
        One result per folder whose log needed it.

    Raises:
        LeaseHeldError: The stream is running.
        SinkRollbackError: No snapshot has captured the log, or it cannot be rebuilt. Nothing was changed.
        LiveDirectoryError: An entry of a log cannot be parsed.
        StorageAccessError: A sink, a snapshot or the live directory cannot be reached.
    """
    folders = [sink.folder for sink in sinks_of(sinks_written(stream)) if isinstance(sink, FileSink)]
    broken = [folder for folder in folders if _is_incomplete(folder, _committed(stream))]
    planned = [_plan(stream, folder) for folder in broken]
    if dry_run or not planned:
        return [result for _, result in planned]
    holder = this_holder(f"rebuild-output-{uuid.uuid4()}", origin, None)
    acquired = acquire(stream.catalog, stream.stream_id, holder)
    with LeaseKeeper(stream.catalog, acquired.record) as lease:
        fence_predecessor(stream, acquired, still_mine=lease.check)
        # Its query may have gone on until it was fenced.
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
    """The newest snapshot on the timeline that has captured the log of a folder, and that log."""
    for snapshot in stream.catalog.snapshots.restorable(stream.stream_id):
        try:
            logs = logs_in_snapshot(stream.store, snapshot.location or "")
        except StorageAccessError:
            raise
        except CkptError:
            # Damaged: an older one may have it too.
            continue
        entries = next((entries for place, entries in logs.items() if same_folder(place, folder)), None)
        if entries:
            return snapshot, entries
    raise SinkRollbackError(
        f"The log of {folder} is not rebuilt, nothing was changed: no snapshot of stream {stream.stream_id!r} has "
        "captured it. Put it back from a backup, or write to a new folder."
    )
