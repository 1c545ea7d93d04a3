"""What Dagster says of the run that a step belongs to: who began it, and who ends it."""

from collections.abc import Mapping

import dagster as dg

from dagster_ckpt.catalog import StartCause
from dagster_ckpt.orchestration.tags import PARENT_RUN_ID_TAG, RESTART_OF_TAG, RETRY_NUMBER_TAG
from dagster_ckpt.orchestration.time_limit import has_time_limit


def cancelled_by_a_person(context: dg.AssetExecutionContext | dg.OpExecutionContext) -> dg.DagsterRunStatus | None:
    """What Dagster says of a run that a person has terminated; None where nobody has, or a time limit may have."""
    run = context.instance.get_run_by_id(context.run.run_id)
    if run is None or has_time_limit(context.instance, context.run.tags):
        return None
    return run.status if run.status in (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED) else None


def start_cause(tags: Mapping[str, str], *, has_begun: bool = False) -> StartCause:
    """Who began a run: a person, also by re-executing one on the page, or a restart, also one of Dagster's retries.

    Args:
        tags: The tags of the run.
        has_begun: Whether the stream was begun in this run before, by a process that is gone.
    """
    if RETRY_NUMBER_TAG in tags or has_begun:
        return StartCause.RESTART_NEW_RUN
    # A re-executed run has the tags of the one before.
    if RESTART_OF_TAG in tags and PARENT_RUN_ID_TAG not in tags:
        return StartCause.RESTART_NEW_RUN
    return StartCause.MANUAL
