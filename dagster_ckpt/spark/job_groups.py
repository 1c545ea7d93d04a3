"""Run long Spark jobs so that they can be recognized, watched and canceled: a thread and a job group each."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pyspark import SparkContext

_POLL_S = 0.2
_Result = TypeVar("_Result")


def in_job_group(
    context: SparkContext, description: str, work: Callable[[], _Result], check_aborted: Callable[[], None]
) -> _Result:
    """Run Spark jobs in a thread of their own, and wait for them.

    A call that blocks in the JVM must not be made by the main thread, which an interrupt would
    leave in the middle of a reply.

    Args:
        context: The Spark context.
        description: Description of the jobs, which Spark's page shows.
        work: Runs them, and nothing that it must not run outside of the main thread.
        check_aborted: Called several times a second; if it raises, the jobs are canceled.

    Returns:
        What `work` returns.
    """
    group = f"dagster-ckpt-{uuid.uuid4()}"

    def run() -> _Result:
        context.setJobGroup(group, description, interruptOnCancel=True)
        return work()

    with ThreadPoolExecutor(1, thread_name_prefix="spark-jobs") as pool:
        future = pool.submit(run)
        try:
            while not wait([future], timeout=_POLL_S).done:
                check_aborted()
        except BaseException:
            # Jobs that it starts later are not canceled, so each of its steps must end by itself.
            while not wait([future], timeout=_POLL_S).done:
                context.cancelJobGroup(group)
            raise
    return future.result()
