"""Checks that refuse a run whose stream Dagster might start a second time."""

import dagster as dg

from dagster_ckpt.errors import OptionError

MAX_RETRIES_TAG = "dagster/max_retries"
StepContext = dg.OpExecutionContext | dg.AssetExecutionContext


def refuse_retry_policy(context: StepContext) -> None:
    """Refuse an op with a retry policy: Dagster would retry it after a cancel (dagster-io/dagster#15026).

    Raises:
        OptionError: The op has a retry policy.
    """
    step = context.op_execution_context
    if step.job_def.get_retry_policy_for_handle(step.op_handle) is not None:
        raise OptionError(
            f"{step.op_def.name} has a RetryPolicy, its own or that of job {step.job_name}: Dagster would start the "
            "stream again after a cancel. Remove it; restarts come from the stream's restart_strategy."
        )


def refuse_run_retries(context: StepContext) -> None:
    """Refuse a run that Dagster would retry in addition to the supervisor sensor.

    Raises:
        OptionError: The run would be retried.
    """
    step = context.op_execution_context
    retries = _run_retries(step)
    if retries > 0:
        raise OptionError(
            f"Dagster would retry this run of {step.op_def.name} up to {retries} times, beside the stream's "
            f'restart_strategy. Start it with the stream\'s own job, or tag run or job {MAX_RETRIES_TAG}: "0".'
        )


def refuse_required_outputs(context: StepContext) -> None:
    """Refuse required outputs: a stream must be able to end without another materialization.

    Raises:
        OptionError: An output is required, so the step would fail when the stream ends.
    """
    op_def = context.op_execution_context.op_def
    required = [out.name for out in op_def.output_defs if out.is_required and not out.dagster_type.is_nothing]
    if required:
        raise OptionError(
            f"The outputs {required} of {op_def.name} are required, but a stream yields none: its checkpoints are "
            "reported by the catalog sensor. Give @dg.asset output_required=False, each AssetSpec of a @dg.multi_asset "
            "skippable=True, and an op dg.Out(is_required=False)."
        )


def _run_retries(context: dg.OpExecutionContext) -> int:
    tag = context.run.tags.get(MAX_RETRIES_TAG)
    if tag is not None:
        return int(tag) if tag.isdecimal() else 0
    instance = context.instance
    return instance.run_retries_max_retries if instance.run_retries_enabled else 0
