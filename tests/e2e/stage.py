"""A Dagster instance with streams that die on it: launching, killing, and waiting for what follows."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import requests
from dagster import DagsterRunStatus

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionRecord, ExecutionStatus, LeaseRecord
from dagster_ckpt.errors import CkptError
from dagster_ckpt.orchestration.run_status import worker_of
from examples.flights.dagster_dev import DagsterDev, running_dagster_dev
from examples.flights.workspace import Workspace

LIMIT_S = 360.0
DEFINITIONS = Path(__file__).with_name("dying_streams.py")
SETTINGS = """
telemetry: {enabled: false}
nux: {enabled: false}
run_coordinator: {module: dagster._core.run_coordinator, class: DefaultRunCoordinator}
run_monitoring: {enabled: true, poll_interval_seconds: 2, cancel_timeout_seconds: 180, max_resume_run_attempts: 0}
run_retries: {enabled: true, max_retries: 0}
"""


@dataclass(frozen=True)
class Ending:
    """How a run of a stream ended, and what was there afterwards.

    Attributes:
        recorded: What Dagster says of the run.
        before: The execution that ended, as the catalog had it while it ran.
        after: The same execution, once its run was over.
        log: What the run's log says.
        checkpoints: How many completed checkpoints the stream had.
        live_directory_stays: Whether its live directory was there.
        successor: The execution that goes on, where one was waited for.
    """

    recorded: DagsterRunStatus
    before: ExecutionRecord
    after: ExecutionRecord
    log: str
    checkpoints: int
    live_directory_stays: bool
    successor: ExecutionRecord | None = None


class Stage:
    """A home of Dagster with a catalog; `dagster dev` comes and goes on it."""

    def __init__(self, root: Path, definitions: Path = DEFINITIONS) -> None:
        self._definitions = definitions
        self.workspace = Workspace(root)
        self.workspace.create()
        (self.workspace.dagster_home / "dagster.yaml").write_text(SETTINGS)
        self.catalog = Catalog(self.workspace.catalog_url)
        self.instance = dg.DagsterInstance.from_config(str(self.workspace.dagster_home))
        self._dev: DagsterDev | None = None
        self._open = ExitStack()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.power_off()
        self._open.close()
        self.catalog.close()
        self.instance.dispose()

    @property
    def dev(self) -> DagsterDev:
        assert self._dev is not None, "dagster dev was not started"
        return self._dev

    def start_dagster(self) -> None:
        """Start `dagster dev` as a person does in a terminal; what an earlier one has left running goes on."""
        self._dev = self._open.enter_context(running_dagster_dev(self.workspace, self._definitions))

    def launch(self, job: str, config: dict[str, Any] | None = None, **tags: str) -> str:
        return self.dev.launch(job, config, {name.replace("__", "/"): value for name, value in tags.items()})

    def running(
        self, stream: str, run_id: str | None = None, *, after: ExecutionRecord | None = None
    ) -> ExecutionRecord:
        """Wait until an execution of a stream runs and has a checkpoint: of a run, or one after another."""

        def runs() -> bool:
            latest = self.catalog.executions.latest(stream)
            return (
                latest is not None
                and latest.status is ExecutionStatus.RUNNING
                and (run_id is None or latest.run_id == run_id)
                and (after is None or latest.execution_id != after.execution_id)
                and any(
                    snapshot.execution_id == latest.execution_id
                    for snapshot in self.catalog.snapshots.completed(stream)
                )
            )

        self.wait_for(runs, f"{stream} to run{f' after {after.execution_id}' if after else ''}")
        latest = self.catalog.executions.latest(stream)
        assert latest is not None
        return latest

    def lease(self, stream: str) -> LeaseRecord:
        lease = self.catalog.leases.current(stream)
        assert lease is not None, f"nobody holds the lease of {stream}"
        return lease

    def worker_pid(self, execution: ExecutionRecord) -> int:
        """The process of the run, which with the multiprocess executor is not that of the step."""
        worker = worker_of(self.instance, execution.run_id)
        assert worker is not None
        return worker.pid

    def spare(self, execution: ExecutionRecord) -> int:
        """Wait until the run of a stream has a spare process that is ready; returns its pid."""
        found: list[str] = []

        def is_ready() -> bool:
            found[:] = re.findall(r"The spare process (\d+) is ready", self.log(execution.run_id))
            return bool(found) and _lives(int(found[-1])) and int(found[-1]) != execution.pid

        self.wait_for(is_ready, f"a spare process of {execution.stream_id}")
        return int(found[-1])

    def numbers_written(self) -> list[int]:
        """The rows of the file sink, by its log."""
        log = self.workspace.output / "_spark_metadata"
        lines = {line for entry in log.glob("[0-9]*") for line in entry.read_text().splitlines()[1:]}
        paths = {Path(json.loads(line)["path"].removeprefix("file://")) for line in lines}
        return sorted(json.loads(row)["value"] for path in paths for row in path.read_text().splitlines())

    def await_death(self, *pids: int | None) -> None:
        for pid in pids:
            self.wait_for(lambda pid=pid: not _lives(pid), f"process {pid} to end")

    def await_beats(self, execution: ExecutionRecord, *, count: int = 2) -> None:
        """Wait until a stream has shown that it goes on: newer heartbeats with newer batches."""
        for _ in range(count):
            seen = self.catalog.executions.get(execution.execution_id)
            self.wait_for(
                lambda seen=seen: _batch(self.catalog.executions.get(execution.execution_id)) > _batch(seen),
                f"{execution.stream_id} to go on",
            )

    def ending(self, before: ExecutionRecord, *, settled: bool = False, comes_back: bool = False) -> Ending:
        """Wait until the run of an execution is over, and for what is said to follow; look around then."""
        self.wait_for(lambda: self.run(before).is_finished, f"the end of run {before.run_id} of {before.stream_id}")
        if settled:
            self.wait_for(
                lambda: self.catalog.executions.get(before.execution_id).settled, f"{before.stream_id} to be settled"
            )
        checkpoints = len([i for i in self.catalog.snapshots.completed(before.stream_id) if i.kind == "CHECKPOINT"])
        successor = self.running(before.stream_id, after=before) if comes_back else None
        return Ending(
            # Where a time limit ends it, the run first says that it was canceled, and then the daemon that it failed.
            recorded=self.run(before).status,
            before=before,
            after=self.catalog.executions.get(before.execution_id),
            log=self.log(before.run_id),
            checkpoints=checkpoints,
            live_directory_stays=Path(str(before.live_directory).removeprefix("file://")).is_dir(),
            successor=successor,
        )

    def run(self, execution: ExecutionRecord) -> dg.DagsterRun:
        run = self.instance.get_run_by_id(execution.run_id)
        assert run is not None
        return run

    def log(self, run_id: str) -> str:
        """Everything that the page shows of a run: its messages, and why its step failed."""
        lines = []
        for entry in self.instance.all_logs(run_id):
            lines.append(entry.message)
            if entry.dagster_event is not None and entry.dagster_event.is_step_failure:
                failure = entry.dagster_event.step_failure_data
                lines += [str(failure.user_failure_data), str(failure.error)]
        return "\n".join(lines)

    def force_terminate(self, run_id: str) -> None:
        """The page's checkbox: mark as canceled, whatever the process does."""
        self.dev.query(
            "mutation($run: String!) { terminateRun(runId: $run, terminatePolicy: MARK_AS_CANCELED_IMMEDIATELY) "
            "{ __typename } }",
            {"run": run_id},
        )

    def terminate_somehow(self, run_id: str) -> None:
        """The page's button, whose answer may be an error, or none in time."""
        with contextlib.suppress(CkptError, requests.RequestException):
            self.dev.query("mutation($run: String!) { terminateRun(runId: $run) { __typename } }", {"run": run_id})

    def processes(self, words: str = "") -> list[psutil.Process]:
        """Processes of this home, Java's too, whose command line has these words beside each other."""
        home = str(self.workspace.dagster_home)
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if process.environ().get("DAGSTER_HOME") == home and words in line:
                    found.append(process)
        return found

    def press_ctrl_c(self) -> None:
        """What a terminal does: SIGINT to every process of the group."""
        os.killpg(self.dev.process.pid, signal.SIGINT)
        self.dev.process.wait(LIMIT_S)

    def power_off(self) -> None:
        """Kill everything at once."""
        while doomed := self.processes():
            for process in doomed:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(doomed, timeout=LIMIT_S)

    def boot_again(self) -> None:
        """Let every lease be one of an earlier boot of this machine."""
        with contextlib.closing(sqlite3.connect(self.workspace.root / "catalog.db")) as database, database:
            database.execute("UPDATE leases SET boot_id = 'the boot before' WHERE boot_id IS NOT NULL")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > deadline:
                tail = "\n".join(self.dev.log.read_text(errors="replace").splitlines()[-40:])
                raise TimeoutError(f"waited {LIMIT_S:.0f} s for {what}; the end of the log:\n{tail}")
            time.sleep(0.2)


def kill(pid: int | None, sign: signal.Signals = signal.SIGKILL) -> None:
    assert pid is not None
    os.kill(pid, sign)


def _lives(pid: int | None) -> bool:
    try:
        return pid is not None and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _batch(execution: ExecutionRecord) -> int:
    batch = (execution.progress or {}).get("batch_id")
    return -1 if batch is None else int(batch)
