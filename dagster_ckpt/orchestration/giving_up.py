"""What people see when a stream is not restarted any more."""

from __future__ import annotations

import dagster as dg

from dagster_ckpt.catalog import Catalog, ExecutionRecord
from dagster_ckpt.orchestration.tags import GAVE_UP_TAG


def tell_given_up(instance: dg.DagsterInstance, catalog: Catalog, execution: ExecutionRecord, reason: str) -> str:
    """Tell everywhere that a stream has failed for good: its last run, its tags, and the catalog.

    The run carries `dagster_ckpt/gave_up` from now on, so that a run failure sensor, or a filter on the page, tells the
    end of a crash loop from a failure that is made good.

    Args:
        instance: The Dagster instance.
        catalog: The catalog; it gets an event `GAVE_UP`.
        execution: The last execution.
        reason: Why there is no further restart, as the restart strategy says it.

    Returns:
        The same in one sentence, for a log.
    """
    failures = len(catalog.executions.failures_since_manual_start(execution.job_id))
    sentence = (
        f"The stream {execution.job_id} has failed for good after {failures} "
        f"{'failure' if failures == 1 else 'failures'}: {reason} The last one: {execution.reason}. Remove the "
        f"cause, then start the stream's job again, or run restart_stream_job for {execution.job_id}; it goes on "
        "from where it stopped."
    )
    catalog.executions.gave_up(execution.execution_id, reason)
    run = instance.get_run_by_id(execution.run_id)
    if run is not None:
        instance.add_run_tags(run.run_id, {GAVE_UP_TAG: reason})
        instance.report_engine_event(sentence, run)
    return sentence
