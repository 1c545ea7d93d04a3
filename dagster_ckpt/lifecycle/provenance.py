"""Where an image comes from: what its live directory does not show, but the job and the running query do."""

from __future__ import annotations

from collections.abc import Sequence

from dagster_ckpt.catalog import ImageTrigger
from dagster_ckpt.lifecycle.job import StreamingJob
from dagster_ckpt.spark import QueryFacts, guarantees


def provenance(job: StreamingJob, sinks: Sequence[str], facts: QueryFacts | None = None) -> dict[str, object]:
    """Properties for an image that is about to be taken.

    Args:
        job: The job.
        sinks: Its sinks, as the progress of the query names them.
        facts: What the running query knows of itself; None for a query that does not run. Its code version is left
            out then: the code that is loaded now need not be what wrote the live directory.

    Returns:
        `parent_image_id` (the image before it on this timeline, or the one that the timeline began with), `timeline`,
        and of a
        running query `code_version`, `plan_fingerprint`, `spark_version`, `mode` and `guarantee`. `plan` is that of
        the running query, else that of the query that was started last. What is not known is left out.
    """
    before = next(iter(job.catalog.images.restorable(job.job_id)), None)
    record = job.catalog.jobs.get(job.job_id)
    known: dict[str, object | None] = {
        "parent_image_id": before.image_id if before is not None else None,
        "timeline": record.timeline,
    }
    if facts is not None:
        known["code_version"] = job.code_version
        known["plan_fingerprint"] = facts.plan_fingerprint
        known["plan"] = facts.plan.as_record() if facts.plan is not None else None
        known["spark_version"] = facts.spark_version
        if facts.mode is not None:
            known |= guarantees(facts.mode, sinks).properties()
    else:
        known["plan"] = record.plan or None
    return {name: value for name, value in known.items() if value is not None}


def asked(trigger: ImageTrigger, schedule: str | None) -> dict[str, object]:
    """Properties that say why an image is taken, for a catalog that is rebuilt."""
    return {"trigger": trigger.value, **({"schedule": schedule} if schedule is not None else {})}
