"""Copy large snapshots with Spark's executors; the driver only plans.

Each task reads its files from the live directory and writes separate data objects. The driver
writes the manifest, so a snapshot becomes visible atomically.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_ckpt.errors import CkptError, StorageAccessError
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.packs import Checks, Create, PackRunner, PackTask, Threads, pack_names, write_packs
from dagster_ckpt.snapshot.reuse import Source

if TYPE_CHECKING:
    from pyspark import SparkContext

# Several tasks per core, so that no core is left waiting for one task that got large files.
_TASKS_A_CORE = 2
_POLL_S = 0.2
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

    def run(self, tasks: Sequence[PackTask], create: Create, checks: Checks) -> int:
        """Write every task; returns the number of bytes written."""
        if not self.takes(sum(file.size for task in tasks for file in task.files)):
            return self.threads.run(tasks, create, checks)
        for task in tasks:
            for name in pack_names(task):
                # Executors cannot report in time which objects they create, so all possible names
                # are recorded.
                checks.made(name)
        written = 0
        for task, outcome in zip(tasks, self._collect([(task, create) for task in tasks], checks), strict=True):
            if isinstance(outcome, CkptError):
                raise outcome
            checks.wrote(list(task.files), outcome.entries)
            written += outcome.written
        return written

    def _collect(self, work: Sequence[tuple[PackTask, Create]], checks: Checks) -> list[_Copied | CkptError]:
        group = f"dagster-ckpt-{uuid.uuid4()}"

        def collect() -> list[_Copied | CkptError]:
            self.context.setJobGroup(group, "copy a snapshot", interruptOnCancel=True)
            return self.context.parallelize(work, len(work)).map(_copy).collect()

        with ThreadPoolExecutor(1, thread_name_prefix="executor-copy") as pool:
            future = pool.submit(collect)
            try:
                while not wait([future], timeout=_POLL_S).done:
                    checks.check_aborted()
            except BaseException:
                self.context.cancelJobGroup(group)
                raise
        try:
            return future.result()
        except Exception as error:
            raise StorageAccessError(
                f"Spark's executors could not copy the snapshot: {error}. They must reach live directory and "
                "snapshots by "
                "the same URLs as the driver, and have dagster-ckpt installed. Without executor_copy_bytes the driver "
                "copies."
            ) from error


def executors_above(total_bytes: int) -> ExecutorCopy | None:
    """Executors of this process's application, for snapshots above this size; None without an application."""
    # Imported here, because live directories can be read without Spark.
    from pyspark import SparkContext  # noqa: PLC0415

    context = SparkContext._active_spark_context
    return ExecutorCopy(context, total_bytes) if context is not None else None


@dataclass(frozen=True)
class _Copied:
    """Result of a task: the entries of its files, and the number of bytes written."""

    entries: list[FileEntry]
    written: int


def _copy(work: tuple[PackTask, Create]) -> _Copied | CkptError:
    task, create = work
    entries: list[FileEntry] = []

    def wrote(_files: Sequence[Source], told: Sequence[FileEntry]) -> None:
        entries.extend(told)

    try:
        written = write_packs(task, create, Checks(_no_op, bool, _no_op, _no_op, wrote))
    except CkptError as error:
        # Returned instead of raised: Spark would retry a hopeless task and lose the type of the
        # error.
        return error
    return _Copied(entries, written)


def _no_op(*_: object) -> None:
    """Do nothing: an executor has no callbacks to the driver."""
