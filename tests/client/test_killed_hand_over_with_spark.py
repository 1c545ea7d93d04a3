"""Real queries that are handed over from release to release while files come in; one of the two processes is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dagster_ckpt import CheckpointConfig, RestartStrategies, run_stream
from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.database import Database
from dagster_ckpt.catalog.records import HANDS_OVER, ExecutionRecord, ExecutionStatus, RequestKind, RequestStatus
from dagster_ckpt.catalog.requests import RequestRecords
from dagster_ckpt.client.launching import START_REQUEST_VARIABLE
from tests.support.executioner import CHANGES, Executioner
from tests.support.handed_over import HandOver, differs_as_declared
from tests.support.small_spark import lay_file, small_spark
from tests.support.small_stream import STREAM

pytestmark = [
    pytest.mark.spark,
    pytest.mark.thorough(sample="tests/client/test_hand_over_kills.py"),
    pytest.mark.timeout(2400),
]
ROOT = Path(__file__).parents[2]
PATIENCE_S = 180.0
ROUNDS = 12
# About as many as a process changes until its query runs, with the comparison of two batches.
STEPS = 60
KILLED_AT = "DAGSTER_CKPT_TEST_KILLED_AT"


class Releases:
    """A stream whose releases follow each other, each a process, and who supervises them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.catalog = Catalog(f"sqlite:///{root}/catalog.db")
        self.version = 0
        self.processes: list[subprocess.Popen[bytes]] = []
        self.files = 0
        self.is_over = threading.Event()
        (root / "in").mkdir()

    def feed(self) -> None:
        while not self.is_over.wait(0.5):
            lay_file(self.root / "in", self.files, [{"a": 5 * self.files + row} for row in range(10)])
            self.files += 1

    @property
    def requests(self) -> RequestRecords:
        return self.catalog.requests

    @property
    def newest(self) -> ExecutionRecord | None:
        return self.catalog.executions.latest(STREAM)

    def launch(self, *, start: str | None = None, killed_at: int | None = None) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **({START_REQUEST_VARIABLE: start} if start else {})}
        if killed_at is not None:
            environment[KILLED_AT] = str(killed_at)
        command = [sys.executable, "-m", "tests.client.test_killed_hand_over_with_spark", str(self.root)]
        with (self.root / "said.log").open("ab") as log:
            # In a group of its own, with its JVM.
            process = subprocess.Popen(
                [*command, str(self.version)], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    def runs(self, process: subprocess.Popen[bytes]) -> bool:
        newest = self.newest
        return newest is not None and newest.pid == process.pid and newest.status is ExecutionStatus.RUNNING

    def follow(self, start: str, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """As a supervisor does: launch again whom the query was stopped for, or what does not run; who runs then."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)
            runs = [each for each in self.processes if each.poll() is None]
            if process in runs:
                if self.runs(process):
                    return process
                continue
            # Its JVM is gone too.
            self.kill(process)
            is_open = self.requests.get(start).status in (RequestStatus.PENDING, RequestStatus.ACCEPTED)
            if is_open and not self.requests.give_up_start(start, "its run died"):
                process = self.launch(start=start)
            elif not runs:
                process = self.launch()
            elif self.runs(runs[0]):
                return runs[0]

    def release(self, *, victim: str, chance: random.Random) -> None:
        """The next release takes over from this one, and one of them is killed."""
        [old] = [each for each in self.processes if each.poll() is None]
        self.version += 1
        arguments = {"start_from": "latest", HANDS_OVER: True, "verify_batches": 2}
        start = self.requests.submit(STREAM, RequestKind.START, arguments=arguments, origin="a test").request_id
        new = self.launch(start=start, killed_at=chance.randrange(STEPS) if victim == "new" else None)
        if victim == "old":
            self.wait(lambda: self.is_asked_to_stop() or self.runs(new) or new.poll() is not None)
            time.sleep(chance.uniform(0, 0.4))
            self.kill(old)
        now = self.follow(start, new)
        if now is old:
            self.version -= 1
        self.wait(lambda: all(each is now or each.poll() is not None for each in self.processes))

    def is_asked_to_stop(self) -> bool:
        asked = self.requests.unanswered(STREAM)
        return any(each.kind is RequestKind.SUSPEND for each in asked)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline, self.said()
            # The old query ends soon after it was asked to.
            time.sleep(0.005)

    def said(self) -> str:
        return (self.root / "said.log").read_text()[-6000:]

    def stop(self) -> None:
        for process in self.processes:
            self.kill(process)
        self.catalog.close()


def test_exactly_one_release_goes_on_with_every_row_once(tmp_path: Path) -> None:
    chance = random.Random(7)
    stream = Releases(tmp_path)
    feeder = threading.Thread(target=stream.feed)
    try:
        feeder.start()
        first = stream.launch()
        stream.wait(lambda: stream.runs(first))
        for _ in range(ROUNDS):
            stream.release(victim=chance.choice(["old", "new", "new", "nobody"]), chance=chance)
        killed = [each for each in stream.processes if each.poll() == -signal.SIGKILL]
        assert len(killed) > ROUNDS / 3
        stream.is_over.set()
        feeder.join()
        with small_spark() as spark:
            of = HandOver(spark, tmp_path)
            stream.wait(lambda: of.small.rows().total() >= 5 * stream.files + 5)
            found = of.small.rows()
        assert Counter(id_ for id_, _ in found.elements()) == Counter(range(5 * stream.files + 5))
        codes = [code for _, code in sorted(found)]
        assert codes == sorted(codes)
        assert len(set(codes)) > ROUNDS / 3, stream.said()
    finally:
        stream.is_over.set()
        feeder.join()
        stream.stop()


def _in_a_process(root: Path, version: int) -> None:
    if KILLED_AT in os.environ:
        Executioner(pytest.MonkeyPatch(), int(os.environ[KILLED_AT]), *CHANGES, (Database, "writing"), is_real=True)
    with small_spark() as spark:
        of = HandOver(spark, root)
        run_stream(
            STREAM,
            lambda _: of.described(version).trigger(processingTime="200 milliseconds"),
            catalog=f"sqlite:///{root}/catalog.db",
            storage=f"file://{root}/snapshots",
            live_root=f"{root}/live",
            spark=spark,
            restart_strategy=RestartStrategies.no_restart(),
            checkpointing=CheckpointConfig(interval=2_000, cleanup="RETAIN_ON_CANCELLATION"),
            code_version=str(version),
            unexpected_rows=differs_as_declared,
        )


if __name__ == "__main__":
    _in_a_process(Path(sys.argv[1]), int(sys.argv[2]))
