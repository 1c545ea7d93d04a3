"""Describes streams and snapshots from the catalog."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import DesiredRecord
from dagster_ckpt.catalog.records import (
    ExecutionRecord,
    ExecutionStatus,
    HoldRecord,
    RequestRecord,
    SnapshotRecord,
    SnapshotStatus,
    StreamRecord,
)
from dagster_ckpt.errors import SnapshotNotFoundError
from dagster_ckpt.stream.lease import has_living_holder
from dagster_ckpt.stream.liveness import is_held

if TYPE_CHECKING:
    from dagster_ckpt.snapshot.manifest import SnapshotHeader
    from dagster_ckpt.stream.handle import StreamHandle
    from dagster_ckpt.stream.recorded_settings import RecordedSettings

LATEST = "latest"


@dataclass(frozen=True)
class StreamDescription:
    """Result of `Client.describe_stream`.

    Attributes:
        desired: None if the stream is not managed.
        requests: Those not yet accepted, oldest first.
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
        return self.summary.stream_id


@dataclass(frozen=True)
class SnapshotDescription:
    record: SnapshotRecord
    holds: tuple[HoldRecord, ...]
    header: SnapshotHeader = field(repr=False)
    file_count: int
    full_bytes: int


def describe_stream(catalog: Catalog, stream_id: str, *, limit: int) -> StreamDescription:
    from dagster_ckpt.stream.recorded_settings import RecordedSettings

    record = catalog.streams.get(stream_id)
    executions = catalog.executions.of_stream(stream_id, limit=limit)
    newest = catalog.history.newest_of([stream_id]).get(stream_id)
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
    """Return the completed snapshot that `reference` names."""
    from dagster_ckpt.stream.snapshots import named

    listed = catalog.snapshots.of_stream(stream_id, status=SnapshotStatus.COMPLETED)
    if reference == LATEST and listed:
        return listed[0]
    found = named(listed, reference)
    if found is None:
        raise unknown_snapshot(stream_id, reference, listed)
    return found


def unknown_snapshot(stream_id: str, reference: str, listed: Sequence[SnapshotRecord]) -> SnapshotNotFoundError:
    from dagster_ckpt.stream.snapshots import describe_snapshot

    names = ", ".join(map(describe_snapshot, listed[:8])) or "none"
    return SnapshotNotFoundError(
        f"Stream {stream_id!r} has no snapshot {reference!r}. It has: {names}. Name one of these."
    )


def describe_snapshot_of(stream: StreamHandle, reference: str) -> SnapshotDescription:
    record = find_snapshot(stream.catalog, stream.stream_id, reference)
    manifest = stream.store.manifest(record.location or "")
    holds = tuple(stream.catalog.holds.on(record.snapshot_id))
    return SnapshotDescription(record, holds, manifest.header, manifest.file_count, manifest.full_bytes)


class StreamStatus(StrEnum):
    """What a stream is doing.

    STARTING: Its state is being prepared. FAILED: It failed or died; the restart strategy may start it again.
    SUSPENDED, CANCELED and FINISHED: How its last execution ended.
    """

    NEVER_STARTED = "NEVER_STARTED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    FAILED = "FAILED"
    SUSPENDED = "SUSPENDED"
    CANCELED = "CANCELED"
    FINISHED = "FINISHED"


@dataclass(frozen=True)
class StreamSummary:
    """Result of `Client.list_streams` for one stream.

    Attributes:
        asset_key: The assets that it writes, or its name outside Dagster.
        batch_id: The newest batch known as committed.
        broken: Why its row could not be fully read.
        records_behind: None if it is not running, or no source reports it.
    """

    stream_id: str
    asset_key: str
    status: StreamStatus
    reason: str | None = field(repr=False)
    batch_id: int | None
    newest_snapshot: SnapshotRecord | None
    broken: str | None = field(default=None, repr=False)
    rows_per_second: float | None = field(default=None, repr=False)
    records_behind: int | None = field(default=None, repr=False)


def summarize_streams(catalog: Catalog) -> list[StreamSummary]:
    records = catalog.streams.all()
    stream_ids = [record.stream_id for record in records]
    executions = catalog.executions.latest_of(stream_ids)
    newest = catalog.history.newest_of(stream_ids)
    held = {lease.stream_id for lease in catalog.leases.all_held() if is_held(lease)}
    return [
        summary_of(
            record,
            executions.get(record.stream_id),
            newest.get(record.stream_id),
            has_living_holder=record.stream_id in held,
        )
        for record in records
    ]


def summary_of(
    record: StreamRecord, last: ExecutionRecord | None, newest: SnapshotRecord | None, *, has_living_holder: bool
) -> StreamSummary:
    """Summarize a stream; `newest` is the snapshot that a recovery would use."""
    progress = (last.progress if last is not None else None) or {}
    # A process that has just started reported no batch, and a report may be older than a snapshot.
    known = [last.newest_batch if last is not None else None, newest.batch_id if newest is not None else None]
    status = _status(last, has_living_holder=has_living_holder)
    is_over = last is not None and status not in (StreamStatus.STARTING, StreamStatus.RUNNING)
    speed = progress.get("rows_per_second") if status is StreamStatus.RUNNING else None
    return StreamSummary(
        stream_id=record.stream_id,
        asset_key=record.asset_key,
        status=status,
        reason=last.reason if last is not None and is_over else None,
        batch_id=max((batch_id for batch_id in known if batch_id is not None), default=None),
        newest_snapshot=newest,
        broken=record.broken or (last.broken if last is not None else None),
        rows_per_second=speed if isinstance(speed, int | float) else None,
        records_behind=_records_behind(progress) if status is StreamStatus.RUNNING else None,
    )


def _records_behind(progress: Mapping[str, Any]) -> int | None:
    sources = progress.get("sources")
    reported = [each.get("behind") for each in sources if isinstance(each, dict)] if isinstance(sources, list) else []
    known = [behind for behind in reported if isinstance(behind, int)]
    return sum(known) if known else None


def _status(last: ExecutionRecord | None, *, has_living_holder: bool) -> StreamStatus:
    if last is None:
        return StreamStatus.NEVER_STARTED
    if last.status is ExecutionStatus.BROKEN or (not last.status.is_over and not has_living_holder):
        # The process died without recording its end.
        return StreamStatus.FAILED
    return StreamStatus(last.status.value)
