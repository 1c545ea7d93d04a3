"""Queries about the snapshots of many streams, one query for all of them.

Each query starts from the streams and uses an index from there, so its cost grows with the number
of streams and not with the length of their histories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, TextClause, and_, func, select, text

from dagster_ckpt.catalog.records import EventType, SnapshotRecord, SnapshotStatus, SnapshotTrigger
from dagster_ckpt.catalog.tables import snapshots, streams


@dataclass(frozen=True)
class SnapshotTally:
    """Totals over several checkpoints.

    Attributes:
        count: Number of checkpoints.
        rows: Input rows, as far as their executions saw them.
        incremental_bytes: Number of bytes written for them.
    """

    count: int
    rows: int
    incremental_bytes: int


@dataclass(frozen=True)
class SnapshotHistory:
    """Health indicators of a stream from its snapshots.

    Attributes:
        newest: The newest restorable snapshot.
        verified: The snapshot that was verified last; it may have been deleted since.
        failures: Number of failed attempts since the newest snapshot.
        last_failure: Why the last of them failed.
        bytes_before: Full bytes of the first snapshot in the requested window.
        slowest_ms: Longest duration among the last completed checkpoints, or None.
    """

    newest: SnapshotRecord | None = None
    verified: SnapshotRecord | None = None
    failures: int = 0
    last_failure: str | None = None
    bytes_before: int | None = None
    slowest_ms: int | None = None


_restorable = snapshots.alias("restorable")


_verified = snapshots.alias("verified")


_failed = snapshots.alias("failed")


_sized = snapshots.alias("sized")


_timed = snapshots.alias("timed")


# The last attempts up to the newest snapshot: enough to see a slow one, few enough for every look.
_TIMED = 10


WAS_COMPLETED = (SnapshotStatus.COMPLETED.value, SnapshotStatus.DELETING.value, SnapshotStatus.DELETED.value)


def _newest_restorable(wanted: Any) -> Any:
    """A column of the snapshot that a recovery of the stream would use."""
    return (
        select(wanted)
        .where(_restorable.c.stream_id == streams.c.stream_id, _restorable.c.status == SnapshotStatus.COMPLETED.value)
        .where(
            # A savepoint with edited state is not used unless a start has named it.
            ((_restorable.c.timeline == streams.c.timeline) & (_restorable.c.trigger != SnapshotTrigger.EDIT.value))
            | (_restorable.c.snapshot_id == streams.c.restored_snapshot_id)
        )
        .order_by(_restorable.c.number.desc())
        .limit(1)
        .correlate(streams)
        .scalar_subquery()
    )


def past_of(timeline: int, begins: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """The ancestors of a timeline, each with the last batch that belongs to its history.

    Args:
        timeline: The timeline.
        begins: For each timeline, its parent and the batch after which it branched off.
    """
    past: dict[int, int] = {}
    to_batch: int | None = None
    while timeline in begins:
        timeline, batch = begins[timeline]
        to_batch = batch if to_batch is None else min(batch, to_batch)
        if timeline in past:
            break
        past[timeline] = to_batch
    return past


def newest_restorable(stream_ids: Sequence[str]) -> Select[Any]:
    """The snapshot that a recovery of each of these streams would use."""
    return (
        select(snapshots)
        .select_from(streams.join(snapshots, snapshots.c.snapshot_id == _newest_restorable(_restorable.c.snapshot_id)))
        .where(streams.c.stream_id.in_(stream_ids))
    )


def histories(stream_ids: Sequence[str], since_ms: int) -> Select[Any]:
    """Health indicators of each of these streams.

    Columns: stream_id; newest and verified, which are ids of snapshots; failures and last_failure,
    since the newest one; bytes_before, of the first snapshot since `since_ms`; and slowest_ms, the
    longest duration among the last completed checkpoints.
    """
    newest_number = func.coalesce(_newest_restorable(_restorable.c.number), 0)
    failed_since = and_(
        _failed.c.stream_id == streams.c.stream_id,
        _failed.c.status == SnapshotStatus.FAILED.value,
        _failed.c.number > newest_number,
        # A renewal completes the newest one once more, under its old number.
        _failed.c.created_at_ms >= func.coalesce(_newest_restorable(_restorable.c.completed_at_ms), 0),
    )
    verified = (
        select(_verified.c.snapshot_id)
        .where(_verified.c.stream_id == streams.c.stream_id, _verified.c.verified_at_ms.is_not(None))
        .order_by(_verified.c.verified_at_ms.desc())
        .limit(1)
    )
    failures = select(func.count()).select_from(_failed).where(failed_since)
    last_failure = select(_failed.c.failure_reason).where(failed_since).order_by(_failed.c.number.desc()).limit(1)
    first_size = (
        select(_sized.c.full_bytes)
        .where(
            _sized.c.stream_id == streams.c.stream_id,
            _sized.c.completed_at_ms >= since_ms,
            _sized.c.full_bytes.is_not(None),
        )
        .order_by(_sized.c.completed_at_ms)
        .limit(1)
    )
    slowest = select(func.max(_timed.c.duration_ms)).where(
        _timed.c.stream_id == streams.c.stream_id,
        _timed.c.status.in_(WAS_COMPLETED),
        _timed.c.number > newest_number - _TIMED,
        _timed.c.kind == "CHECKPOINT",
    )
    return select(
        streams.c.stream_id,
        _newest_restorable(_restorable.c.snapshot_id).label("newest"),
        verified.correlate(streams).scalar_subquery().label("verified"),
        failures.correlate(streams).scalar_subquery().label("failures"),
        last_failure.correlate(streams).scalar_subquery().label("last_failure"),
        first_size.correlate(streams).scalar_subquery().label("bytes_before"),
        slowest.correlate(streams).scalar_subquery().label("slowest_ms"),
    ).where(streams.c.stream_id.in_(stream_ids))


def tallies(spans: Sequence[tuple[str, int, int]]) -> TextClause:
    """Totals over the checkpoints that were completed in given spans of events.

    Args:
        spans: Stream, the sequence before the first event, and that of the last.

    Columns: place, the index of the span in the list; taken; rows; incremental_bytes. Spans without
    checkpoints are omitted.
    """
    # Literal rows: compiling a `values()` of hundreds of rows in each call takes longer than the
    # query itself.
    rows = ", ".join(f"({place}, :stream_{place}, {after:d}, {last:d})" for place, (_, after, last) in enumerate(spans))
    query = text(f"WITH span (place, stream_id, since, last) AS (VALUES {rows}) {_TALLY}")
    return query.bindparams(**{f"stream_{place}": stream_id for place, (stream_id, _, _) in enumerate(spans)})


_TALLY = f"""
SELECT span.place, count(*) AS taken, sum(snapshots.rows) AS rows, sum(snapshots.incremental_bytes) AS incremental_bytes
FROM span
JOIN events ON events.stream_id = span.stream_id AND events.sequence > span.since AND events.sequence <= span.last
    AND events.type = '{EventType.CHECKPOINT_COMPLETED.value}'
LEFT JOIN snapshots ON snapshots.snapshot_id = events.snapshot_id
GROUP BY span.place
"""
