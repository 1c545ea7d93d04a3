"""Damaged logs of a stream's file sinks: a recovery writes them back from a snapshot that captured them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dagster_ckpt.catalog.pending_restore import ToBatch
from dagster_ckpt.catalog.records import SnapshotRecord, StreamRecord
from dagster_ckpt.errors import CkptError, StorageAccessError
from dagster_ckpt.io.location import same_folder
from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.sinks.file_sink_repair import DamagedLog, damaged_log, is_moved_log, relocated
from dagster_ckpt.sinks.registry import captured_sinks, described_sink, logs_in_snapshot, sinks_of
from dagster_ckpt.sinks.sink import Sink
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import sinks_written


def damaged_sink_logs(
    stream: StreamHandle, record: StreamRecord, output: NamedOutput | None, live: LiveDirectory | None
) -> list[DamagedLog]:
    """The damaged logs that only this stream writes, and that a snapshot of its timeline captured.

    The survey of the sinks refuses any other. If `output` is unknown, the sinks written last are examined.
    """
    if not isinstance(record.pending_restore, ToBatch | None):
        # An interrupted start continues with the sinks whatever their logs say.
        return []
    written = sinks_of(sinks_written(stream))
    described = described_sink(output)
    others = sinks_of(stream.catalog.executions.sinks_of_others(stream.stream_id))
    damaged = []
    # A query that writes files always names their folder.
    named = written if output is None else [described] if described is not None else []
    for sink in named:
        if not isinstance(sink, FileSink) or not sink.is_among(written) or sink.is_among(others):
            continue
        captured = _captured(stream, sink.folder)
        # Read before the log: a query writes there before it commits.
        committed = live.positions().commit if live is not None else None
        # The query may have compacted the log meanwhile, if it still runs elsewhere.
        if captured and damaged_log(sink.folder, captured, committed) is not None:
            found = damaged_log(sink.folder, captured, committed)
            damaged += [found] if found is not None else []
    return damaged


def lacks_the_log(snapshot: SnapshotRecord, damaged: Sequence[DamagedLog]) -> str | None:
    """Why a recovery cannot go back to a snapshot: it lacks a damaged log."""
    captured = captured_sinks(snapshot.properties)
    if captured is None:
        return None
    for log in damaged:
        if not FileSink.at(log.folder).is_among(captured):
            return f"it has not captured the log of {log.folder}, which is damaged"
    return None


def with_moved_logs(logs: Mapping[str, Sequence[SinkEntry]], sinks: Sequence[Sink]) -> dict[str, Sequence[SinkEntry]]:
    """The logs in a snapshot, and those of folders to which their files were moved since."""
    found = dict(logs)
    for sink in sinks:
        if not isinstance(sink, FileSink) or any(same_folder(place, sink.folder) for place in logs):
            continue
        for place, entries in logs.items():
            if is_moved_log(sink.folder, entries):
                found[sink.folder] = relocated(entries, place, sink.folder)
                break
    return found


def is_moved_output(stream: StreamHandle, sink: FileSink, ours: Sequence[Sink]) -> bool:
    """Whether a folder has the captured log of another folder of the stream."""
    folders = [each.folder for each in ours if isinstance(each, FileSink)]
    return any(is_moved_log(sink.folder, _captured(stream, folder)) for folder in folders)


def _captured(stream: StreamHandle, folder: str) -> Sequence[SinkEntry]:
    for snapshot in stream.catalog.snapshots.restorable(stream.stream_id):
        try:
            logs: Mapping[str, Any] = logs_in_snapshot(stream.store, snapshot.location or "")
        except StorageAccessError:
            raise
        except CkptError:
            # Damaged or deleted: an older one may have it too.
            continue
        entries: Sequence[SinkEntry] = next(
            (entries for place, entries in logs.items() if same_folder(place, folder)), ()
        )
        if entries:
            return entries
    return ()
