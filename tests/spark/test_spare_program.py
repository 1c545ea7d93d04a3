"""Two processes of one stream, of which one is a spare: the other is killed or stopped, and the spare continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dagster_ckpt import CheckpointConfig, Client, RestartStrategies, run_stream
from dagster_ckpt.catalog.records import ExecutionRecord, ExecutionStatus
from tests.support.small_spark import SETTINGS
from tests.support.small_stream import STREAM, SmallStream, dedup, distinct

pytestmark = [
    pytest.mark.spark,
    pytest.mark.thorough(sample="tests/client/test_spares.py"),
    pytest.mark.timeout(600),
]
ROOT = Path(__file__).parents[2]
PATIENCE_S = 180.0


class Programs:
    def __init__(self, small: SmallStream, client: Client) -> None:
        self.small, self.client = small, client
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> int:
        """Returns its pid."""
        with (self.small.root / "said.log").open("ab") as log:
            command = [sys.executable, "-m", "tests.spark.test_spare_program", str(self.small.root)]
            program = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        self.running[program.pid] = program
        return program.pid

    def await_spare(self, count: int) -> None:
        """Until so many processes have reported that they wait."""
        self._wait(lambda: self._said().count("waits as a spare: another process runs it") == count)

    def await_batch(self, pid: int, *, files: int) -> ExecutionRecord:
        """Until a process has read so many files."""

        def has_read() -> bool:
            latest = self._latest()
            committed = self.small.live / "commits" if latest is not None and latest.live_directory else None
            is_its = latest is not None and latest.pid == pid and latest.status is ExecutionStatus.RUNNING
            return is_its and committed is not None and (committed / str(files - 1)).exists()

        self._wait(has_read)
        latest = self._latest()
        assert latest is not None
        return latest

    def end(self, pid: int, sign: signal.Signals) -> None:
        """End a process, by SIGKILL with its JVM."""
        (os.killpg if sign is signal.SIGKILL else os.kill)(pid, sign)
        self.running.pop(pid).wait(PATIENCE_S)

    def end_all(self) -> None:
        for pid in list(self.running):
            with suppress(ProcessLookupError):
                self.end(pid, signal.SIGKILL)

    def _latest(self) -> ExecutionRecord | None:
        return self.client.catalog.executions.latest(STREAM)

    def _said(self) -> str:
        return (self.small.root / "said.log").read_text(errors="replace")

    def _wait(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, self._said()[-4_000:]
            time.sleep(0.2)


def test_whichever_dies_the_other_continues(spark: SparkSession, tmp_path: Path) -> None:
    small = SmallStream(spark, tmp_path)
    small.feed(3)
    with small.client() as client:
        programs = Programs(small, client)
        try:
            first = programs.start()
            programs.await_batch(first, files=3)
            second = programs.start()
            programs.await_spare(1)
            programs.end(first, signal.SIGKILL)
            small.feed(3)
            assert programs.await_batch(second, files=6).cause == "RESTART_NEW_RUN"

            third = programs.start()
            programs.await_spare(2)
            # As a service manager does before its machine is maintained.
            programs.end(second, signal.SIGTERM)
            small.feed(3)
            programs.await_batch(third, files=9)

            fourth = programs.start()
            programs.await_spare(3)
            client.stop(STREAM, savepoint=False)
            assert programs.running.pop(third).wait(PATIENCE_S) == 0
            client.request_start(STREAM)
            small.feed(3)
            programs.await_batch(fourth, files=12)
        finally:
            programs.end_all()

    assert small.rows() == distinct(12)


def run(root: Path) -> None:
    """A process of the stream."""
    builder = SparkSession.builder.master("local[1]")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    small = SmallStream(builder.getOrCreate(), root, dedup)
    run_stream(
        STREAM,
        lambda spark: small.writer()(spark).trigger(processingTime="200 milliseconds"),
        **small.places,
        spark=small.spark,
        checkpointing=CheckpointConfig(interval=1_000),
        restart_strategy=RestartStrategies.fixed_delay_restart(10, 0),
        standby=True,
    )


if __name__ == "__main__":
    run(Path(sys.argv[1]))
