"""What the catalog knows of one stream or snapshot, as a value to print, and how a user names a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import DesiredRecord
from dagster_ckpt.catalog.records import (
    ExecutionRecord,
    HoldRecord,
    RequestRecord,
    SnapshotRecord,
    SnapshotStatus,
    StreamRecord,
)
from dagster_ckpt.errors import SnapshotNotFoundError
from dagster_ckpt.operations.overview import StreamSummary, summary_of
from dagster_ckpt.stream.handle import RecordedSettings
from dagster_ckpt.stream.lease import has_living_holder
from dagster_ckpt.stream.snapshots import describe_snapshot, named

if TYPE_CHECKING:
    from dagster_ckpt.snapshot.manifest import SnapshotHeader
    from dagster_ckpt.stream.handle import StreamHandle

LATEST = "latest"


@dataclass(frozen=True)
class StreamDescription:
    """A stream in full.

    Attributes:
        summary: What it is doing.
        settings: Its checkpointing options, restart strategy and places, as of its last registration.
        record: Its row in the catalog: live directory, timeline, where its state came from.
        desired: Its desired state and upgrade; None if it is not managed.
        executions: Its executions, newest first, up to the limit.
        snapshots: Its completed snapshots, newest first, up to the limit.
        requests: Requests that no process has accepted yet, oldest first.
    """

    summary: StreamSummary
    settings: RecordedSettings
    record: StreamRecord = field(repr=False)
    desired: DesiredRecord | None
    executions: tuple[ExecutionRecord, ...] = field(repr=False)
    snapshots: tuple[SnapshotRecord, ...]
    requests: tuple[RequestRecord, ...]

    @property
    def stream_id(self) -> str:
        """Id of the stream."""
        return self.summary.stream_id


@dataclass(frozen=True)
class SnapshotDescription:
    """A snapshot in full.

    Attributes:
        record: Its row in the catalog.
        holds: What protects it from deletion at the moment.
        header: The header in its metadata: operators, sinks, plan.
        file_count: Number of its files.
        full_bytes: Number of bytes that a restore reads.
    """

    record: SnapshotRecord
    holds: tuple[HoldRecord, ...]
    header: SnapshotHeader = field(repr=False)
    file_count: int
    full_bytes: int


def describe_stream(catalog: Catalog, stream_id: str, *, limit: int) -> StreamDescription:
    """A stream in full.

    Args:
        catalog: The catalog.
        stream_id: The stream.
        limit: Maximum number of executions and of snapshots.

    Raises:
        StreamNotFoundError: It was never started.
    """
    record = catalog.streams.get(stream_id)
    executions = catalog.executions.of_stream(stream_id, limit=limit)
    newest = catalog.snapshots.newest_of([stream_id]).get(stream_id)
    return StreamDescription(
        summary=summary_of(
            record,
            executions[0] if executions else None,
            newest,
            has_living_holder=has_living_holder(catalog, stream_id),
        ),
        settings=RecordedSettings.of_record(record.options),
        record=record,
        desired=catalog.desired_states.find(stream_id),
        executions=tuple(executions),
        snapshots=tuple(catalog.snapshots.completed(stream_id)[:limit]),
        requests=tuple(catalog.requests.pending(stream_id)),
    )


def find_snapshot(catalog: Catalog, stream_id: str, reference: str) -> SnapshotRecord:
    """A completed snapshot that the catalog lists.

    Args:
        catalog: The catalog.
        stream_id: The stream.
        reference: `latest`, or its id, number (`chk-7`), label or location.

    Raises:
        SnapshotNotFoundError: There is none of this name.
        OptionError: Several have this label.
    """
    listed = catalog.snapshots.of_stream(stream_id, status=SnapshotStatus.COMPLETED)
    if reference == LATEST and listed:
        return listed[0]
    found = named(listed, reference)
    if found is None:
        raise SnapshotNotFoundError(
            f"Stream {stream_id!r} has no snapshot {reference!r}. It has: {_names(listed)}. Name one of these."
        )
    return found


def describe_snapshot_of(stream: StreamHandle, reference: str) -> SnapshotDescription:
    """A snapshot in full, with what its metadata says.

    Raises:
        SnapshotNotFoundError: There is no such snapshot.
        SnapshotCorruptError: Its metadata cannot be read.
        StorageAccessError: Its storage cannot be reached.
    """
    record = find_snapshot(stream.catalog, stream.stream_id, reference)
    manifest = stream.store.manifest(record.location or "")
    holds = tuple(stream.catalog.holds.on(record.snapshot_id))
    return SnapshotDescription(record, holds, manifest.header, manifest.file_count, manifest.full_bytes)


def _names(snapshots: Sequence[SnapshotRecord]) -> str:
    return ", ".join(describe_snapshot(snapshot) for snapshot in snapshots[:8]) or "none"
