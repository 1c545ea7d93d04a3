"""Questions about the images of many jobs, each asked in one query, however many the jobs are.

Every one begins at the jobs and goes to an index from there: what it costs grows with the jobs that it is asked about,
not with their histories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Select, TextClause, and_, func, select, text

from dagster_ckpt.catalog.records import EventType, ImageStatus
from dagster_ckpt.catalog.tables import images, jobs

_restorable = images.alias("restorable")
_verified = images.alias("verified")
_failed = images.alias("failed")
_sized = images.alias("sized")


def _newest_restorable(wanted: Any) -> Any:
    """A column of the image that a job would be recovered from."""
    return (
        select(wanted)
        .where(_restorable.c.job_id == jobs.c.job_id, _restorable.c.status == ImageStatus.COMPLETED.value)
        .where((_restorable.c.timeline == jobs.c.timeline) | (_restorable.c.image_id == jobs.c.restored_image_id))
        .order_by(_restorable.c.number.desc())
        .limit(1)
        .correlate(jobs)
        .scalar_subquery()
    )


def past_of(timeline: int, begins: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """The timelines that one goes back to, each with the last batch that belongs to its past.

    Args:
        timeline: The timeline.
        begins: By timeline, the one that it went on from, and after which batch.
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


def newest_restorable(job_ids: Sequence[str]) -> Select[Any]:
    """The image that each of these jobs would be recovered from."""
    return (
        select(images)
        .select_from(jobs.join(images, images.c.image_id == _newest_restorable(_restorable.c.image_id)))
        .where(jobs.c.job_id.in_(job_ids))
    )


def histories(job_ids: Sequence[str], since_ms: int) -> Select[Any]:
    """What tells of the health of each of these jobs.

    Columns: job_id; newest and verified, which are ids of images; failures and last_failure, since the newest one; and
    bytes_before, of the first image since `since_ms`.
    """
    newest_number = func.coalesce(_newest_restorable(_restorable.c.number), 0)
    failed_since = and_(
        _failed.c.job_id == jobs.c.job_id,
        _failed.c.status == ImageStatus.FAILED.value,
        _failed.c.number > newest_number,
    )
    verified = (
        select(_verified.c.image_id)
        .where(_verified.c.job_id == jobs.c.job_id, _verified.c.verified_at_ms.is_not(None))
        .order_by(_verified.c.verified_at_ms.desc())
        .limit(1)
    )
    failures = select(func.count()).select_from(_failed).where(failed_since)
    last_failure = select(_failed.c.failure_reason).where(failed_since).order_by(_failed.c.number.desc()).limit(1)
    first_size = (
        select(_sized.c.full_bytes)
        .where(_sized.c.job_id == jobs.c.job_id, _sized.c.completed_at_ms >= since_ms, _sized.c.full_bytes.is_not(None))
        .order_by(_sized.c.completed_at_ms)
        .limit(1)
    )
    return select(
        jobs.c.job_id,
        _newest_restorable(_restorable.c.image_id).label("newest"),
        verified.correlate(jobs).scalar_subquery().label("verified"),
        failures.correlate(jobs).scalar_subquery().label("failures"),
        last_failure.correlate(jobs).scalar_subquery().label("last_failure"),
        first_size.correlate(jobs).scalar_subquery().label("bytes_before"),
    ).where(jobs.c.job_id.in_(job_ids))


def tallies(spans: Sequence[tuple[str, int, int]]) -> TextClause:
    """What the checkpoints amount to that were completed in spans of events.

    Args:
        spans: Job, the sequence before the first event, and that of the last.

    Columns: place, which is that of the span in the list; taken; rows; incremental_bytes. A span without any is left
    out.
    """
    # Written out: a `values()` of hundreds of rows takes longer to be compiled, at each call, than to be answered.
    rows = ", ".join(f"({place}, :job_{place}, {after:d}, {last:d})" for place, (_, after, last) in enumerate(spans))
    query = text(f"WITH span (place, job_id, since, last) AS (VALUES {rows}) {_TALLY}")
    return query.bindparams(**{f"job_{place}": job_id for place, (job_id, _, _) in enumerate(spans)})


_TALLY = f"""
SELECT span.place, count(*) AS taken, sum(images.rows) AS rows, sum(images.incremental_bytes) AS incremental_bytes
FROM span
JOIN events ON events.job_id = span.job_id AND events.sequence > span.since AND events.sequence <= span.last
    AND events.type = '{EventType.CHECKPOINT_COMPLETED.value}'
LEFT JOIN images ON images.image_id = events.image_id
GROUP BY span.place
"""
