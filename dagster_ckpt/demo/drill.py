"""`make demo`: everything that usually loses a stream, done to one on purpose, and the outcome compared.

The streams run under a real `dagster dev` while the flights of 2013 arrive. One is killed in the middle
of a batch, the other loses its live directory, a savepoint is taken and later rewound to. In the end
the table of every asset is compared, row for row, with that of an uninterrupted run of the same feed.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from dagster import DagsterRunStatus
from rich.console import Console

from dagster_ckpt.catalog import Catalog, ExecutionRecord, ExecutionStatus, ImageStatus
from dagster_ckpt.demo.assets import airport_day_summary_job
from dagster_ckpt.demo.dagster_dev import DagsterDev
from dagster_ckpt.demo.workspace import Workspace
from dagster_ckpt.errors import CkptError
from dagster_ckpt.orchestration import StreamingAsset
from dagster_ckpt.spark import LiveDirectory

DEFINITIONS = Path(__file__).parents[2] / "definitions.py"
SAVEPOINT_LABEL = "before-the-bad-deployment"
STEP_TIMEOUT_S = 120.0


class Drill:
    """The steps of the drill, each of which waits for what it says.

    Args:
        workspace: An empty workspace.
        dev: A running `dagster dev` on it.
        console: Where progress is told.
    """

    def __init__(self, workspace: Workspace, dev: DagsterDev, console: Console) -> None:
        self._workspace = workspace
        self._dev = dev
        self._console = console
        self._catalog = Catalog(workspace.catalog_url)

    def start(self, stream: StreamingAsset) -> None:
        """Launch a stream as the launchpad does."""
        self._dev.launch(stream.start_job.name)

    def await_checkpoint(self, stream: StreamingAsset, *, execution_id: str | None = None) -> None:
        """Wait until an execution of a stream has completed a checkpoint."""

        def completed() -> bool:
            images = self._catalog.images.of_job(stream.job_id, status=ImageStatus.COMPLETED)
            return any(execution_id in (None, image.execution_id) for image in images)

        self._await(completed, f"a checkpoint of {stream.job_id}")

    def kill_in_the_middle_of_a_batch(self, stream: StreamingAsset) -> str:
        """SIGKILL to the stream's process and its JVM while a batch is planned and not committed."""
        execution = self._running(stream)
        live = LiveDirectory(_known(execution.live_directory))
        lease = self._catalog.leases.current(stream.job_id)
        if lease is None:
            raise CkptError(f"{stream.job_id} holds no lease although it runs.")
        victims = [psutil.Process(lease.pid), *([psutil.Process(lease.jvm_pid)] if lease.jvm_pid else [])]

        def in_the_middle() -> bool:
            positions = live.positions()
            return positions.offset is not None and positions.offset > (positions.commit or -1)

        self._await(in_the_middle, f"a batch of {stream.job_id} under way", poll_s=0.01)
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGKILL)
        positions = live.positions()
        self._say(f"killed {stream.job_id} in batch {positions.offset}; committed was {positions.commit}")
        return execution.execution_id

    def delete_live_directory(self, stream: StreamingAsset) -> str:
        """Remove Spark's checkpoint directory under the running query."""
        execution = self._running(stream)
        directory = _known(execution.live_directory)
        LiveDirectory(directory).delete()
        self._say(f"deleted {directory} under the running query")
        return execution.execution_id

    def await_successor(self, stream: StreamingAsset, execution_id: str) -> None:
        """Wait until another execution of a stream runs; tell what it started from."""

        def runs() -> bool:
            latest = self._catalog.executions.latest(stream.job_id)
            return (
                latest is not None and latest.execution_id != execution_id and latest.status is ExecutionStatus.RUNNING
            )

        self._await(runs, f"a new execution of {stream.job_id}")
        successor = self._running(stream)
        reason = (successor.recovery or {}).get("reason", "")
        self._say(f"{stream.job_id} runs again ({successor.cause.value.lower().replace('_', ' ')}): {reason}")

    def take_savepoint(self, stream: StreamingAsset, label: str) -> None:
        """Trigger a savepoint through its job, while the stream runs."""
        self._run_job("trigger_savepoint_job", "trigger_savepoint", {"job_id": stream.job_id, "label": label})

    def rewind(self, stream: StreamingAsset, label: str) -> None:
        """Restart a running stream from a savepoint."""
        before = self._running(stream).execution_id
        self._run_job("restart_stream_job", "restart_stream", {"job_id": stream.job_id, "start_from": label})
        self.await_successor(stream, before)

    def await_caught_up(self, stream: StreamingAsset, final_watermark: str) -> None:
        """Wait until a stream has processed the whole feed: idle, at the watermark the feed ends with."""

        def caught_up() -> bool:
            progress = self._running(stream).progress or {}
            return bool(progress.get("idle")) and progress.get("watermark") == final_watermark

        self._await(caught_up, f"{stream.job_id} at watermark {final_watermark}")

    def stop(self, stream: StreamingAsset) -> None:
        """Stop a stream with a savepoint."""
        self._run_job("stop_with_savepoint_job", "stop_with_savepoint", {"job_id": stream.job_id, "label": "the-end"})

    def summarise(self) -> None:
        """Materialize the batch asset once the streams have ended."""
        self._await_idle_downstream()
        run_id = self._dev.launch(airport_day_summary_job.name)
        self._expect_success(airport_day_summary_job.name, run_id)

    def _run_job(self, job: str, op: str, config: dict[str, Any]) -> None:
        run_id = self._dev.launch(job, {"ops": {op: {"config": config}}})
        self._expect_success(job, run_id)

    def _expect_success(self, job: str, run_id: str) -> None:
        status = self._dev.await_end(run_id, timeout_s=STEP_TIMEOUT_S)
        if status is not DagsterRunStatus.SUCCESS:
            raise CkptError(f"{job} ended {status.value}; run {run_id}, log {self._dev.log}")
        self._say(f"{job}: done")

    def _await_idle_downstream(self) -> None:
        client_query = (
            """{ runsOrError(filter: {pipelineName: "%s", statuses: [STARTED, STARTING, NOT_STARTED]})
            { ... on Runs { results { runId } } } }"""
            % airport_day_summary_job.name
        )
        self._await(
            lambda: not self._dev.query(client_query)["runsOrError"]["results"],
            f"{airport_day_summary_job.name} to be idle",
        )

    def _running(self, stream: StreamingAsset) -> ExecutionRecord:
        latest = self._catalog.executions.latest(stream.job_id)
        if latest is None:
            raise CkptError(f"{stream.job_id} was never started.")
        return latest

    def _await(self, condition: Callable[[], bool], what: str, *, poll_s: float = 0.25) -> None:
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while not condition():
            if time.monotonic() >= deadline:
                raise CkptError(f"Waited {STEP_TIMEOUT_S:.0f} s for {what}, in vain. Log: {self._dev.log}")
            time.sleep(poll_s)

    def _say(self, sentence: str) -> None:
        self._console.log(sentence)


def _known(directory: str | None) -> str:
    if directory is None:
        raise CkptError("The execution has no live directory yet.")
    return directory
