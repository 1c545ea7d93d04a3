"""Run long Spark jobs so that they can be recognized, watched and canceled: a thread and a job group each."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pyspark import SparkContext

_POLL_S = 0.2
PROGRESS_EVERY_S = 10.0
_Result = TypeVar("_Result")


class JobProgress:
    """What a long job does just now: the thread that works sets it, the one that waits for it reports it.

    Attributes:
        step: The current step, such as a state store that is written.

    Args:
        report: Called with a message every few seconds.
        every_s: Seconds between two messages.
    """

    def __init__(self, report: Callable[[str], None], every_s: float | None = None) -> None:
        self.step = ""
        self._report = report
        self._every_s = PROGRESS_EVERY_S if every_s is None else every_s
        self._reported = time.monotonic()

    def tick(self, context: SparkContext, group: str) -> None:
        """Report how far it is, if it is time to."""
        if not self.step or time.monotonic() - self._reported < self._every_s:
            return
        done, total = _tasks(context, group)
        self._report(f"{self.step}: {done} of {total} tasks" if total else self.step)
        self._reported = time.monotonic()


def _tasks(context: SparkContext, group: str) -> tuple[int, int]:
    """Number of completed tasks and of all tasks of a group's running jobs."""
    tracker = context.statusTracker()
    running = set(tracker.getActiveJobsIds()) & set(tracker.getJobIdsForGroup(group))
    jobs = [job for each in running if (job := tracker.getJobInfo(each)) is not None]
    stages = [stage for job in jobs for each in job.stageIds if (stage := tracker.getStageInfo(each)) is not None]
    return sum(stage.numCompletedTasks for stage in stages), sum(stage.numTasks for stage in stages)


def in_job_group(
    context: SparkContext,
    description: str,
    work: Callable[[], _Result],
    check_aborted: Callable[[], None],
    progress: JobProgress | None = None,
) -> _Result:
    """Run Spark jobs in a thread of their own, and wait for them.

    A call that blocks in the JVM must not be made by the main thread, which an interrupt would
    leave in the middle of a reply.

    Args:
        context: The Spark context.
        description: Description of the jobs, which Spark's page shows.
        work: Runs them, and nothing that it must not run outside of the main thread.
        check_aborted: Called several times a second; if it raises, the jobs are canceled.
        progress: Reports how far the jobs are.

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
                if progress is not None:
                    progress.tick(context, group)
        except BaseException:
            # Jobs that it starts later are not canceled, so each of its steps must end by itself.
            while not wait([future], timeout=_POLL_S).done:
                context.cancelJobGroup(group)
            raise
    return future.result()
