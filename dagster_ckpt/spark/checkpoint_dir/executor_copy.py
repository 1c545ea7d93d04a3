"""Copying a snapshot with Spark's executors, where it is too much for one machine: the driver only plans.

Each task reads its files from the live directory and writes data objects of its own. The manifest is the driver's, so
a snapshot is visible at once or not at all, whoever copied it.
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

# A task for each core and one more: the last ones should not wait for one that got large files.
_TASKS_A_CORE = 2
_POLL_S = 0.2
_ONE_THREAD = Threads(1)


@dataclass(frozen=True)
class ExecutorCopy:
    """Executors for much, threads of this process for little.

    Attributes:
        context: The application whose executors copy.
        above_bytes: Up to this many bytes threads do it.
        threads: Those threads.
    """

    context: SparkContext
    above_bytes: int
    threads: PackRunner = _ONE_THREAD

    def takes(self, total_bytes: int) -> bool:
        """Whether the executors copy a snapshot that has to write so many bytes."""
        return total_bytes > self.above_bytes

    def width(self, total_bytes: int) -> int:
        """How many tasks to make of so many bytes."""
        cores = int(self.context.defaultParallelism)
        return cores * _TASKS_A_CORE if self.takes(total_bytes) else self.threads.width(total_bytes)

    def run(self, tasks: Sequence[PackTask], create: Create, checks: Checks) -> int:
        """Write every task; returns how many bytes were written."""
        if not self.takes(sum(file.size for task in tasks for file in task.files)):
            return self.threads.run(tasks, create, checks)
        for task in tasks:
            for name in pack_names(task):
                # Executors cannot tell in time which objects they make, so all that they may make are noted.
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
                    checks.go_on()
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
    """Executors of this process's application, for snapshots that write more; None without an application."""
    # Imported here: live directories are read without Spark as well.
    from pyspark import SparkContext  # noqa: PLC0415

    context = SparkContext._active_spark_context
    return ExecutorCopy(context, total_bytes) if context is not None else None


@dataclass(frozen=True)
class _Copied:
    """What a task did: where each of its files lies, and how many bytes it wrote."""

    entries: list[FileEntry]
    written: int


def _copy(work: tuple[PackTask, Create]) -> _Copied | CkptError:
    task, create = work
    entries: list[FileEntry] = []

    def wrote(_files: Sequence[Source], told: Sequence[FileEntry]) -> None:
        entries.extend(told)

    try:
        written = write_packs(task, create, Checks(_nothing, bool, _nothing, _nothing, wrote))
    except CkptError as error:
        # Returned rather than raised: Spark would try again what cannot succeed, and lose the kind of the error.
        return error
    return _Copied(entries, written)


def _nothing(*_: object) -> None:
    """Asks and tells nothing: an executor has nobody to ask."""
