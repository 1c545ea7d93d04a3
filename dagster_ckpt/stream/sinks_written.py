"""The sinks that a stream writes to: those its executions reported, or those of the snapshot it was restored from."""

from __future__ import annotations

from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.catalog.recovery_records import OriginKind
from dagster_ckpt.stream.handle import StreamHandle


def sinks_written(stream: StreamHandle) -> list[str]:
    """The sinks that the newest execution wrote to; after a restore and before the next start, those of the snapshot.

    Raises:
        StreamNotFoundError: The stream was never registered.
    """
    record = stream.catalog.streams.get(stream.stream_id)
    origin = record.origin
    if origin is not None and origin.kind is OriginKind.DIRECTORY:
        origin = origin.earlier
    reported = stream.catalog.executions.last_sinks(stream.stream_id)
    if origin is None or not origin.sinks:
        return reported
    if any(
        each.live_directory == record.live_directory for each in stream.catalog.executions.of_stream(stream.stream_id)
    ):
        return reported
    return list(origin.sinks)


def sinks_of_snapshot(stream: StreamHandle, snapshot: SnapshotRecord) -> tuple[str, ...]:
    """The sinks that a query wrote to when a snapshot was taken, as Spark names them.

    Raises:
        SnapshotCorruptError: The snapshot cannot be read.
        StorageAccessError: It cannot be reached.
    """
    properties = snapshot.properties or (
        stream.store.manifest(snapshot.location).header.properties if snapshot.location else {}
    )
    noted, others = properties.get("sinks"), properties.get("other_sinks")
    files = [f"FileSink[{sink['path']}]" for sink in noted] if isinstance(noted, list) else []
    return (*files, *(str(sink) for sink in (others if isinstance(others, list) else ())))
