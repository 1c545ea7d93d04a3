"""A run that only tries the loaded code on a copy of the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dagster as dg
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt.catalog.desired_states import PreflightRecord
from dagster_ckpt.operations.preflight import preflight
from dagster_ckpt.orchestration._compat import capture_interrupts
from dagster_ckpt.orchestration.runs.run_refusals import StepContext
from dagster_ckpt.spark.query.settings import apply_state_backend
from dagster_ckpt.stream.handle import StreamHandle


def run_preflight(
    context: StepContext,
    handle: StreamHandle,
    resources: Any,
    describe: Callable[[], DataStreamWriter],
    *,
    interrupted: Callable[[], bool],
) -> PreflightRecord:
    """Try the loaded code. The stream, which may be running, is not affected.

    Raises:
        CkptError: The code could not be tried.
    """
    apply_state_backend(resources.pyspark.spark_session, resources.state_backend.backend())
    # Enter again, because creating a Spark session replaces the SIGINT handler.
    with capture_interrupts():
        return preflight(handle, describe, interrupted=interrupted, report=context.log.info)


def check_preflight(context: StepContext, handle: StreamHandle, result: PreflightRecord) -> None:
    """End the step according to the result of the preflight.

    Raises:
        dagster.Failure: The code cannot continue from the state. The run fails so that alerts on failed
            runs fire.
    """
    if not result.passed:
        raise dg.Failure(
            f"Code version {result.code_version} cannot go on from the state of {handle.stream_id}: {result.reason}. "
            "Nothing was changed.",
            metadata={"dagster_ckpt/end": "PREFLIGHT_REFUSED"},
            allow_retries=False,
        )
    context.log.info(f"code version {result.code_version} passed: {result.reason}")
