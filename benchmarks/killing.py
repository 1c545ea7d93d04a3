"""Kills what runs a stream below a `dagster dev`, and says from the records when each phase of the recovery ended."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import dagster as dg
import psutil

from benchmarks import recovering_streams
from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import EventType, ExecutionRecord, ExecutionStatus
from dagster_ckpt.orchestration.run_status import worker_of
from dagster_ckpt.spark.query.class_archive import write_class_archive
from examples.flights.dagster_dev import DagsterDev, running_dagster_dev
from examples.flights.workspace import Workspace

PATIENCE_S = 300.0
_LOOK_S = 0.05
# In which executors that have started take their partitions.
_SETTLED_BATCHES = 10
_READY = re.compile(r"The spare process (\d+) is ready")


class Phase(Enum):
    """What is over at a moment of a recovery, in their order."""

    DETECTED = "detected"
    DECIDED = "decided"
    LAUNCHED = "run launched"
    IMPORTED = "code imported"
    JVM_UP = "JVM up, lease held"
    RESTORED = "restored"
    RUNNING = "query running"
    FIRST_BATCH = "first batch"


class Victim(Enum):
    """What is killed."""

    DRIVER = "driver's Python"
    JVM = "JVM"
    EXECUTOR = "an executor of two"
    RUN = "whole run"


@dataclass(frozen=True)
class Memory:
    """Bytes of a driver's two processes: resident, and with pages that are shared counted in part."""

    python: int
    python_share: int
    jvm: int


@dataclass(frozen=True)
class RunningStream:
    """A stream that runs below a `dagster dev`."""

    name: str
    dev: DagsterDev
    catalog: Catalog
    instance: dg.DagsterInstance

    def start(self) -> None:
        """Launch its run, and wait for its first checkpoint."""
        self.dev.launch(f"{self.name}_stream")
        self.await_checkpoint()

    def stop(self) -> None:
        """Terminate its run."""
        run_id = self._latest().run_id
        self.dev.terminate(run_id)
        self.dev.await_end(run_id, timeout_s=PATIENCE_S)

    def await_checkpoint(self) -> ExecutionRecord:
        """Wait until it runs and has a checkpoint since its start."""

        def has() -> bool:
            latest = self.catalog.executions.latest(self.name)
            if latest is None or latest.status is not ExecutionStatus.RUNNING:
                return False
            snapshots = self.catalog.snapshots.completed(self.name)
            return any(each.execution_id == latest.execution_id for each in snapshots)

        _until(has, f"a checkpoint of {self.name}")
        return self._latest()

    def await_spare(self) -> int:
        """Wait until it has a spare process; returns its pid."""
        run_id, found = self._latest().run_id, list[int]()

        def is_there() -> bool:
            found[:] = [int(match[1]) for _, match in self._said(run_id, _READY)]
            return bool(found) and psutil.pid_exists(found[-1]) and found[-1] != self._latest().pid

        _until(is_there, f"a spare process of {self.name}")
        return found[-1]

    def kill(self, victim: Victim) -> dict[Phase, float]:
        """Kill a part of it; returns the seconds from then to the end of each phase."""
        if victim is Victim.EXECUTOR:
            return {Phase.FIRST_BATCH: self._kill_executor()}
        before = self._latest()
        lease = self.catalog.leases.current(self.name)
        assert lease is not None
        worker = worker_of(self.instance, before.run_id)
        pid = {Victim.DRIVER: before.pid, Victim.JVM: lease.jvm_pid, Victim.RUN: worker.pid if worker else None}[victim]
        assert pid is not None
        since = self.catalog.events.latest_sequence()
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        restored: list[float] = []
        after: list[ExecutionRecord] = []

        def goes_on() -> bool:
            latest = self._latest()
            after[:] = [latest]
            if latest.execution_id == before.execution_id:
                return False
            if not restored and latest.status is ExecutionStatus.STARTING and latest.progress:
                restored.append(latest.heartbeat_at_ms / 1000)
            return latest.status is ExecutionStatus.RUNNING and _first_commit(latest) is not None

        _until(goes_on, f"{self.name} to go on after the {victim.value} was killed")
        [latest] = after
        at = {Phase.FIRST_BATCH: _first_commit(latest)}
        for event in self.catalog.events.after(since):
            if event.execution_id == latest.execution_id and event.type is EventType.EXECUTION_STARTED:
                at[Phase.JVM_UP] = event.at_ms / 1000
            if event.execution_id == latest.execution_id and event.type is EventType.EXECUTION_RUNNING:
                at[Phase.RUNNING] = event.at_ms / 1000
        if restored:
            at[Phase.RESTORED] = restored[0]
        at |= self._of_new_run(before, latest) if victim is Victim.RUN else self._of_same_run(latest.run_id, killed_at)
        return {phase: at_s - killed_at for phase in Phase if (at_s := at.get(phase)) is not None}

    def _kill_executor(self) -> float:
        """Kill an executor; returns the seconds until a batch is committed that was planned afterwards."""
        latest, lease = self._latest(), self.catalog.leases.current(self.name)
        assert lease is not None
        jvm = psutil.Process(lease.jvm_pid)
        executors = list[psutil.Process]()

        def has_all() -> bool:
            executors[:] = [each for each in jvm.children(recursive=True) if _is_executor(each)]
            return len(executors) == recovering_streams.EXECUTORS

        def committed_since(since: float) -> list[float]:
            return [at for planned, at in _batches(latest) if planned > since]

        _until(has_all, f"the executors of {self.name}")
        settling = time.time()
        _until(lambda: len(committed_since(settling)) >= _SETTLED_BATCHES, f"batches of {self.name}")
        killed_at = time.time()
        executors[0].kill()
        _until(lambda: bool(committed_since(killed_at)), f"{self.name} to continue after the loss of an executor")
        return min(committed_since(killed_at)) - killed_at

    def memory(self, pid: int) -> Memory:
        """Of a driver, or of a spare one."""
        python = psutil.Process(pid)
        full = python.memory_full_info()
        jvm = 0
        for child in python.children(recursive=True):
            # Python workers come and go.
            with suppress(psutil.NoSuchProcess):
                jvm += child.memory_info().rss if "java" in child.name() else 0
        return Memory(full.rss, full.pss, jvm)

    @property
    def driver(self) -> int:
        """Pid of the driver."""
        return self._latest().pid

    def _latest(self) -> ExecutionRecord:
        latest = self.catalog.executions.latest(self.name)
        assert latest is not None
        return latest

    def _said(self, run_id: str, words: re.Pattern[str]) -> list[tuple[float, re.Match[str]]]:
        entries = self.instance.all_logs(run_id)
        return [(each.timestamp, match) for each in entries if (match := words.search(each.user_message))]

    def _of_same_run(self, run_id: str, killed_at: float) -> dict[Phase, float | None]:
        def when(words: str) -> float | None:
            return next((at for at, _ in self._said(run_id, re.compile(words)) if at >= killed_at), None)

        return {Phase.DETECTED: when("The restart strategy decides"), Phase.DECIDED: when("Starting the stream in")}

    def _of_new_run(self, before: ExecutionRecord, latest: ExecutionRecord) -> dict[Phase, float | None]:
        old, new = (self.instance.get_run_record_by_id(each.run_id) for each in (before, latest))
        worker = worker_of(self.instance, latest.run_id)
        return {
            Phase.DETECTED: old.end_time if old is not None else None,
            Phase.DECIDED: new.create_timestamp.timestamp() if new is not None else None,
            Phase.LAUNCHED: worker.seen_at_ms / 1000 if worker is not None else None,
            Phase.IMPORTED: new.start_time if new is not None else None,
        }


@contextmanager
def dagster_with_streams(root: Path) -> Iterator[Callable[[str], RunningStream]]:
    """A `dagster dev` with the streams; gives them by name."""
    workspace = Workspace(root)
    workspace.create()
    write_class_archive(root / recovering_streams.ARCHIVE, recovering_streams.SPARK)
    definitions = Path(recovering_streams.__file__)
    with running_dagster_dev(workspace, definitions) as dev, closing(Catalog(workspace.catalog_url)) as catalog:
        instance = dg.DagsterInstance.from_config(str(workspace.dagster_home))
        try:
            yield lambda name: RunningStream(name, dev, catalog, instance)
        finally:
            instance.dispose()


def _first_commit(execution: ExecutionRecord) -> float | None:
    """When the first batch of an execution was committed."""
    return min((at for _, at in _batches(execution) if at * 1000 > execution.started_at_ms), default=None)


def _batches(execution: ExecutionRecord) -> Iterator[tuple[float, float]]:
    """When each batch in the live directory of an execution was planned and committed."""
    if execution.live_directory is None:
        return
    live = Path(execution.live_directory.removeprefix("file://"))
    for commit in live.glob("commits/[0-9]*"):
        # Spark deletes old batches.
        with suppress(FileNotFoundError):
            yield (live / "offsets" / commit.name).stat().st_mtime, commit.stat().st_mtime


def _is_executor(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any(word.endswith("CoarseGrainedExecutorBackend") for word in process.cmdline())
    return False


def _until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_S:.0f} s for {what}")
        time.sleep(_LOOK_S)
