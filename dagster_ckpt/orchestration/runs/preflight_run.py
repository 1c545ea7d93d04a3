"""A run of a stream's job that only tries the code that is loaded, on a copy of the state."""

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
    """Try the code that is loaded; the stream, which may run, is left as it is.

    Raises:
        CkptError: It could not be tried.
    """
    apply_state_backend(resources.pyspark.spark_session, resources.state_backend.backend())
    # Entered again because making a Spark session replaces the SIGINT handler.
    with capture_interrupts():
        return preflight(handle, describe, interrupted=interrupted, report=context.log.info)


def tell_preflight(context: StepContext, handle: StreamHandle, result: PreflightRecord) -> None:
    """End the step as the preflight did.

    Raises:
        dagster.Failure: The code cannot go on from the state, so that whoever watches failed runs is told.
    """
    if not result.passed:
        raise dg.Failure(
            f"Code version {result.code_version} cannot go on from the state of {handle.stream_id}: {result.reason}. "
            "Nothing was changed.",
            metadata={"dagster_ckpt/end": "PREFLIGHT_REFUSED"},
            allow_retries=False,
        )
    context.log.info(f"code version {result.code_version} passed: {result.reason}")
