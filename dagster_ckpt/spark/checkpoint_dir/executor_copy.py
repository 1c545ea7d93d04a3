"""Copy large snapshots with Spark's executors; the driver only plans.

Each task reads its files from the live directory and writes separate data objects. The driver
writes the manifest, so a snapshot becomes visible atomically.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from dagster_ckpt.spark.job_groups import in_job_group

if TYPE_CHECKING:
    from pyspark import SparkContext

# Several tasks per core, so that no core is left waiting for one task that got large files.
_TASKS_A_CORE = 2
_ONE_THREAD = Threads(1)


@dataclass(frozen=True)
class ExecutorCopy:
    """Copies large snapshots with executors, small ones with threads of this process.

    Attributes:
        context: The Spark context of the application.
        above_bytes: Up to this many bytes, threads copy.
        threads: The threads.
    """

    context: SparkContext
    above_bytes: int
    threads: PackRunner = _ONE_THREAD

    def takes(self, total_bytes: int) -> bool:
        """Whether the executors copy a snapshot that writes this many bytes."""
        return total_bytes > self.above_bytes

    def width(self, total_bytes: int) -> int:
        """Number of tasks to create for this many bytes."""
        cores = int(self.context.defaultParallelism)
        return cores * _TASKS_A_CORE if self.takes(total_bytes) else self.threads.width(total_bytes)

    def run(self, tasks: Sequence[PackTask], create: Create, callbacks: PackCallbacks) -> Packed:
        """Write every task."""
        if not self.takes(sum(file.size for task in tasks for file in task.files)):
            return self.threads.run(tasks, create, callbacks)
        for task in tasks:
            for name in pack_names(task):
                # Executors cannot report in time which objects they create, so all possible names
                # are recorded.
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
    """Executors of this process's application, for snapshots above this size; None without an application."""
    # Imported here, because live directories can be read without Spark.
    from pyspark import SparkContext  # noqa: PLC0415

    context = SparkContext._active_spark_context
    return ExecutorCopy(context, total_bytes) if context is not None else None


def _copy(work: tuple[PackTask, Create]) -> Packed | CkptError:
    task, create = work
    try:
        # An executor cannot call back: it compares with nothing, and cannot be aborted alone.
        return write_packs(task, create, PackCallbacks(_no_op, _never, _no_op, _no_op))
    except CkptError as error:
        # Returned instead of raised: Spark would retry a hopeless task and lose the type of the
        # error.
        return error


def _no_op(*_: object) -> None:
    """Do nothing."""


def _never(_: object) -> bool:
    return False
