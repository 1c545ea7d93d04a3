"""The streams of a catalog, as a list to print. A description of one of them is in `description.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionRecord, ExecutionStatus, SnapshotRecord, StreamRecord
from dagster_ckpt.stream.liveness import is_held

_ALIVE = (ExecutionStatus.STARTING, ExecutionStatus.RUNNING)


class StreamStatus(StrEnum):
    """What a stream is doing.

    NEVER_STARTED: It has no execution. STARTING: Its state is being prepared. RUNNING: Its query runs.
    FAILED: Its last execution failed or died; the restart strategy may start it again. SUSPENDED,
    CANCELED and FINISHED: Its last execution ended like this.
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
    """One stream of a list.

    Attributes:
        stream_id: Its id.
        asset_key: The assets that it writes, or its name outside Dagster.
        status: What it is doing.
        reason: Why its last execution ended; None if it has not ended.
        batch_id: The newest batch that its last execution reported as committed, or None.
        newest_snapshot: The snapshot that a recovery would use, or None.
        broken: Why its row in the catalog could not be fully read, or None.
        rows_per_second: Speed of that batch while the query runs, or None.
        records_behind: Records that wait in its sources while the query runs; None if no source reports it.
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
    """All streams of a catalog, by id."""
    records = catalog.streams.all()
    stream_ids = [record.stream_id for record in records]
    executions = catalog.executions.latest_of(stream_ids)
    newest = catalog.snapshots.newest_of(stream_ids)
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
    """The summary of one stream.

    Args:
        record: Its row in the catalog.
        last: Its last execution, if it has one.
        newest: The snapshot that a recovery would use, if it has one.
        has_living_holder: Whether an execution holds its lease and may be alive.
    """
    progress = (last.progress if last is not None else None) or {}
    batch_id = progress.get("batch_id")
    status = _status(last, has_living_holder=has_living_holder)
    is_over = last is not None and status.value not in _ALIVE
    speed = progress.get("rows_per_second") if status is StreamStatus.RUNNING else None
    return StreamSummary(
        stream_id=record.stream_id,
        asset_key=record.asset_key,
        status=status,
        reason=last.reason if last is not None and is_over else None,
        batch_id=batch_id if isinstance(batch_id, int) else None,
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
    if last.status is ExecutionStatus.BROKEN or (last.status in _ALIVE and not has_living_holder):
        # Its process died without recording the end.
        return StreamStatus.FAILED
    return StreamStatus(last.status.value)
