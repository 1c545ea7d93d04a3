"""Spares: processes that have started Spark, and wait until they may continue a stream that runs elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.event_log import log_message
from dagster_ckpt.catalog.records import ExecutionStatus
from dagster_ckpt.client.launching import unlaunched_start
from dagster_ckpt.errors import CatalogError, StartStoppedError
from dagster_ckpt.policies.restart import FailureHistory, RestartAt, decide_restart
from dagster_ckpt.runtime.execution_end import record_death
from dagster_ckpt.spark.query.query import jvm_pid
from dagster_ckpt.spark.query.session import warm_up
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import has_living_holder
from dagster_ckpt.stream.liveness import Liveness, ProcessIdentity

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_POLL_S = 0.5


def prepared_spare(spark: SparkSession) -> Callable[[], bool]:
    """Warm up the session of a waiting process, and return a check that its JVM is alive."""
    # A cold spare only takes longer to continue.
    with suppress(Exception):
        warm_up(spark)
    pid = jvm_pid(spark)
    jvm = ProcessIdentity.of(pid) if pid is not None else None
    return lambda: jvm is None or jvm.liveness() is not Liveness.ENDED


def await_turn(
    stream: StreamHandle,
    prepare: Callable[[], Callable[[], bool]],
    *,
    has_lost: bool = False,
    pause: Callable[[float], object] = time.sleep,
) -> bool:
    """Wait while another process runs the stream, until a failure lets this one continue, or a start is requested.

    A stream that is stopped meanwhile stays stopped. Returns whether it had to wait.

    Args:
        prepare: Called once it has to wait; returns a check that this process is still of use.
        has_lost: Another spare was faster: wait in any case.

    Raises:
        StartStoppedError: The process is of no use any more.
    """
    reported = "another process was faster" if has_lost else None
    is_of_use: Callable[[], bool] | None = None
    while True:
        # Wait while the catalog is unavailable. A spare that lost may look before the other's lease is visible.
        with suppress(CatalogError):
            held = has_living_holder(stream.catalog, stream.stream_id)
            why = "another process runs it" if held else _why_not_continued(stream) if reported is not None else None
            if why is None and not (has_lost and is_of_use is None):
                return reported is not None
            if why is not None and why != reported:
                log_message(stream.stream_id, f"this process waits as a spare: {why}")
                reported = why
        is_of_use = is_of_use or prepare()
        if not is_of_use():
            raise StartStoppedError(
                f"The JVM of this process, a spare of stream {stream.stream_id!r}, has ended. Start the process again."
            )
        pause(_POLL_S)


def _why_not_continued(stream: StreamHandle) -> str | None:
    catalog = stream.catalog
    latest = catalog.executions.latest(stream.stream_id)
    if latest is None or unlaunched_start(catalog, stream.stream_id) is not None:
        return None
    if not latest.status.is_over:
        latest = record_death(catalog, latest)
    if latest.status is not ExecutionStatus.FAILED:
        return f"the stream is {latest.status.value} ({latest.reason or 'its process may be alive'})"
    now_ms = catalog.now_ms()
    failures = FailureHistory(tuple(catalog.executions.failures_since_manual_start(stream.stream_id)) or (now_ms,))
    decision = decide_restart(stream.restart, failures, now_ms, Random(latest.execution_id))
    if isinstance(decision, RestartAt) and decision.at_ms <= now_ms:
        return None
    return f"the stream has failed. {decision.reason}"
