"""A writer of which one process hangs, Python or the JVM: its successor loses no row, and writes none twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from dagster_ckpt.catalog.records import ExecutionStatus
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream import ownership
from tests.support.freezing import freeze, thaw
from tests.support.query_bench import DEADLINE_S, Bench, make_stream
from tests.support.small_spark import small_spark

pytestmark = [pytest.mark.spark, pytest.mark.thorough(sample="tests/spark/test_spark_fenced_query.py")]

LONGEST_CALL_MS = 6_000


class HungWriter:
    """A run of the stream in a process of its own."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        program = Path(__file__).with_name("hung_writer.py")
        self._log = (bench.root / "hung.log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(bench.root), str(LONGEST_CALL_MS)],
            env={**os.environ, "PYTHONPATH": str(Path(ownership.__file__).parents[2])},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._await(lambda: bench.committed() >= 1, "a committed batch")
        lease = bench.stream.catalog.leases.current("orders")
        assert lease is not None
        assert lease.jvm_pid is not None
        self.jvm = psutil.Process(lease.jvm_pid)
        self.live = LiveDirectory(bench.stream.catalog.streams.get("orders").live_directory or "")

    def freeze(self) -> None:
        """Stop its Python process; wait until its JVM has committed on its own and its lease has run out."""
        freeze(self.process.pid)
        frozen_at = self._bench.committed()
        self._await(lambda: self._bench.committed() > frozen_at + 1, "batches that the JVM commits by itself")
        leases = self._bench.stream.catalog.leases
        self._await(lambda: (lease := leases.current("orders")) is not None and lease.expired, "the end of the lease")

    def thaw(self) -> str:
        """Let it go on; what it says in the end."""
        thaw(self.process.pid)
        return self.end()

    def end(self) -> str:
        """Wait until it ends by itself; what it says in the end."""
        self.process.wait(DEADLINE_S)
        return self._said()

    def close(self) -> None:
        for process in (self.process, self.jvm):
            if process.poll() is None if isinstance(process, subprocess.Popen) else process.is_running():
                process.kill()
        self.process.wait()
        self._log.close()

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}: {self._said()[-3000:]}"
            time.sleep(0.05)


@contextmanager
def feeding(bench: Bench) -> Iterator[None]:
    """Lay a file every now and then, so that there is always a batch to plan."""
    over = threading.Event()

    def feed() -> None:
        while not over.wait(0.5):
            bench.feed(1)

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


@pytest.fixture
def bench(spark: SparkSession, tmp_path: Path) -> Bench:
    return Bench(spark, tmp_path, make_stream(tmp_path))


@pytest.fixture
def hung(bench: Bench) -> Iterator[HungWriter]:
    bench.feed(3)
    writer = HungWriter(bench)
    yield writer
    writer.close()


def test_elsewhere_its_query_is_fenced_off(bench: Bench, hung: HungWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    # From another machine its JVM cannot be ended.
    monkeypatch.setattr(ownership, "_end_jvm", lambda *_: False)
    with feeding(bench):
        hung.freeze()
        adopted = bench.committed()
        bench.run(
            lambda: bench.stream.catalog.streams.get("orders").live_generation > 1 and bench.committed() > adopted + 1
        )
    fenced_at = hung.live.fenced_at()
    bench.run_to_the_end()

    assert fenced_at is not None
    assert (hung.live.positions().offset or 0) < fenced_at
    assert hung.jvm.is_running()
    bench.assert_exact()
    assert "ended: LEASE_LOST" in hung.thaw()
    bench.assert_exact()


def test_on_the_same_machine_its_jvm_is_ended(bench: Bench, hung: HungWriter) -> None:
    with feeding(bench):
        hung.freeze()
        adopted = bench.committed()
        bench.run(
            lambda: bench.stream.catalog.streams.get("orders").live_generation > 1 and bench.committed() > adopted + 1
        )
    bench.run_to_the_end()

    assert not hung.jvm.is_running() or hung.jvm.status() == psutil.STATUS_ZOMBIE
    assert any(report.startswith("Killed JVM") for report in bench.reports)
    bench.assert_exact()


def test_a_jvm_that_hangs_is_ended_and_its_successor_continues(bench: Bench, hung: HungWriter) -> None:
    with feeding(bench):
        hung.jvm.send_signal(signal.SIGSTOP)
        said = hung.end()
        lease = bench.stream.catalog.leases.current("orders")
        [execution] = bench.stream.catalog.executions.of_stream("orders")
        bench.run(lambda: bench.committed() > 5)
    bench.run_to_the_end()

    assert f"QueryStalledError: Stream 'orders': its JVM, process {hung.jvm.pid}, did not answer for 6 s" in said
    assert not hung.jvm.is_running()
    assert (execution.status, execution.settled) == (ExecutionStatus.FAILED, False)
    # Its end was certain, so the successor did not wait, and continued in the same directory.
    assert lease is None
    assert bench.stream.catalog.streams.get("orders").live_directory == hung.live.url
    bench.assert_exact()
