"""Run Spark jobs in cancelable job groups, and copy large snapshots with executors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from dagster_ckpt.errors import CkptError, StorageAccessError
from dagster_ckpt.snapshot.packs import (
    Create,
    PackCallbacks,
    Packed,
    PackRunner,
    PackTask,
    Threads,
    pack_names,
    write_packs,
)

if TYPE_CHECKING:
    from pyspark import SparkContext

_POLL_S = 0.2
PROGRESS_EVERY_S = 10.0
_Result = TypeVar("_Result")


class JobProgress:
    def __init__(self, report: Callable[[str], None]) -> None:
        self.step = ""
        self._report = report
        self._reported = time.monotonic()

    def tick(self, context: SparkContext, group: str) -> None:
        if not self.step or time.monotonic() - self._reported < PROGRESS_EVERY_S:
            return
        done, total = _tasks(context, group)
        self._report(f"{self.step}: {done} of {total} tasks" if total else self.step)
        self._reported = time.monotonic()


def _tasks(context: SparkContext, group: str) -> tuple[int, int]:
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
    """Run `work` in a separate thread and Spark job group.

    An interrupt would leave a main thread that blocks in the JVM in the middle of a reply. If `check_aborted`, called
    several times a second, raises, the jobs are canceled.
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
            # Only running jobs are canceled, so repeat it until the work has ended.
            while not wait([future], timeout=_POLL_S).done:
                context.cancelJobGroup(group)
            raise
    return future.result()


_TASKS_PER_CORE = 2
_ONE_THREAD = Threads(1)


@dataclass(frozen=True)
class ExecutorCopy:
    """Copies snapshots of more than `above_bytes` with executors, smaller ones with threads.

    The driver writes the manifest, so a snapshot becomes visible atomically.
    """

    context: SparkContext
    above_bytes: int
    threads: PackRunner = _ONE_THREAD

    def takes(self, total_bytes: int) -> bool:
        return total_bytes > self.above_bytes

    def width(self, total_bytes: int, pack_bytes: int) -> int:
        cores = int(self.context.defaultParallelism)
        return cores * _TASKS_PER_CORE if self.takes(total_bytes) else self.threads.width(total_bytes, pack_bytes)

    def run(self, tasks: Sequence[PackTask], create: Create, callbacks: PackCallbacks) -> Packed:
        if not self.takes(sum(file.size for task in tasks for file in task.files)):
            return self.threads.run(tasks, create, callbacks)
        for task in tasks:
            for name in pack_names(task):
                # Reported here, because executors cannot call back.
                callbacks.creating(name)
        outcomes = self._collect([(task, create) for task in tasks], callbacks)
        for outcome in outcomes:
            if isinstance(outcome, CkptError):
                raise outcome
        return Packed.joined(outcome for outcome in outcomes if isinstance(outcome, Packed))

    def _collect(self, work: Sequence[tuple[PackTask, Create]], callbacks: PackCallbacks) -> list[Packed | CkptError]:
        def collect() -> list[Packed | CkptError]:
            try:
                return self.context.parallelize(work, len(work)).map(_copy).collect()
            except Exception as error:
                raise StorageAccessError(
                    f"Spark's executors could not copy the snapshot: {error}. They must reach live directory and "
                    "snapshots by the same URLs as the driver, and have dagster-ckpt installed. Without "
                    "executor_copy_bytes the driver copies."
                ) from error

        return in_job_group(self.context, "copy a snapshot", collect, callbacks.check_aborted)


def executors_above(total_bytes: int) -> ExecutorCopy | None:
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    return ExecutorCopy(context, total_bytes) if context is not None else None


def _copy(work: tuple[PackTask, Create]) -> Packed | CkptError:
    task, create = work
    try:
        # Executors cannot call back, so no content is compared.
        return write_packs(task, create, PackCallbacks(_no_op, _never, _no_op, _no_op))
    except CkptError as error:
        # Returned, because Spark would retry an error that is raised, and lose its type.
        return error


def _no_op(*_: object) -> None:
    """Do nothing."""


def _never(_: object) -> bool:
    return False
