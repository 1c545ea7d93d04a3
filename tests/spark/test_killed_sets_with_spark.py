"""Running queries that read each other, and the client that takes their sets and restarts from them, all killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import CheckpointConfig, Client, RestartStrategies, run_stream
from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.database import Database
from dagster_ckpt.catalog.records import ExecutionStatus
from tests.support.executioner import CHANGES, Executioner
from tests.support.small_spark import lay_file, small_spark

pytestmark = [
    pytest.mark.spark,
    pytest.mark.thorough(sample="tests/client/test_killed_savepoint_sets.py"),
    pytest.mark.timeout(2400),
]
ROOT = Path(__file__).parents[2]
STREAMS = {"orders": "in", "daily": "orders", "totals": "daily"}
PATIENCE_S = 180.0
ROUNDS = 12
# More than a set, and about as many as a restart, changes.
STEPS = 90


class Graph:
    """A chain of running queries, each in a process of its own; every value arrives once in each output."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.catalog = f"sqlite:///{root}/catalog.db"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.files = 0
        (root / "in").mkdir(parents=True)

    def feed(self, files: int) -> None:
        for number in range(self.files, self.files + files):
            lay_file(self.root / "in", number, [{"a": 3 * number + row} for row in range(5)])
        self.files += files

    def start(self) -> None:
        """Each that does not run, upstream first, as its reader may wait for it."""
        for stream in STREAMS:
            while stream not in self.running or self.running[stream].poll() is not None:
                with (self.root / f"{stream}.log").open("ab") as log:
                    command = [sys.executable, "-m", "tests.spark.test_killed_sets_with_spark", str(self.root), stream]
                    # In a group of its own, with its JVM.
                    self.running[stream] = subprocess.Popen(
                        command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
                    )
                self.wait(partial(self.runs_or_ended, stream))

    def runs_or_ended(self, stream: str) -> bool:
        if self.running[stream].poll() is not None:
            return True
        with closing(Catalog(self.catalog)) as catalog:
            last = catalog.executions.latest(stream)
        return last is not None and last.pid == self.running[stream].pid and last.status is ExecutionStatus.RUNNING

    def kill(self, stream: str) -> None:
        if stream in self.running and self.running[stream].poll() is None:
            os.killpg(self.running[stream].pid, signal.SIGKILL)
            self.running[stream].wait()

    def take(self, label: str, *, killed_at: int | None = None) -> bool:
        return self._in_a_process(
            lambda client: client.trigger_savepoint_set("orders+", label=label, timeout_s=30), killed_at
        )

    def go_back(self, label: str, *, killed_at: int | None = None) -> bool:
        return self._in_a_process(
            lambda client: client.restart_savepoint_set(label, start=False, timeout_s=30), killed_at
        )

    def _in_a_process(self, work: Callable[[Client], object], killed_at: int | None) -> bool:
        """Whether it came to its end; it is killed before the n-th change of files or catalog."""
        child = os.fork()
        if child == 0:
            patch = pytest.MonkeyPatch()
            if killed_at is not None:
                Executioner(patch, killed_at, *CHANGES[:-2], (Database, "writing"), is_real=True)
            try:
                with Client(catalog=self.catalog, storage=f"file://{self.root}/snapshots") as client:
                    work(client)
            except BaseException:  # noqa: BLE001 - whatever a child of a test raises must not go on in the test
                with (self.root / "client.log").open("a") as log:
                    traceback.print_exc(file=log)
                os._exit(3)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        return status == 0

    def stop(self) -> None:
        for stream in self.running:
            self.kill(stream)

    def wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.2)

    def said(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in self.root.glob("*.log"))


def test_no_kill_leaves_streams_that_do_not_belong_together(tmp_path: Path) -> None:
    chance = random.Random(5)
    graph = Graph(tmp_path)
    taken: list[str] = []
    try:
        for number in range(ROUNDS):
            graph.feed(3)
            graph.start()
            # The client, a stream, or both die.
            at_step = chance.choice([None, chance.randrange(STEPS), chance.randrange(STEPS)])
            victim = chance.choice([*STREAMS, *(["nobody"] if at_step is not None else [])])
            blow = threading.Timer(chance.uniform(0, 6), graph.kill, [victim])
            blow.start()
            if number % 2 == 0:
                was_taken = graph.take(f"set-{number}", killed_at=at_step)
                blow.join()
                graph.start()
                assert was_taken or graph.take(f"set-{number}-again"), graph.said()
                taken.append(f"set-{number}" if was_taken else f"set-{number}-again")
            else:
                earlier = chance.choice(taken)
                graph.go_back(earlier, killed_at=at_step)
                blow.join()
                # The same command finishes it, whichever processes are left.
                assert graph.go_back(earlier), graph.said()
        graph.start()
        expected = Counter(range(3 * graph.files + 2))
        with small_spark() as spark:
            graph.wait(lambda: set(rows(spark, tmp_path, "totals")) >= set(expected))
            graph.stop()
            for stream in STREAMS:
                assert rows(spark, tmp_path, stream) == expected, stream
    finally:
        graph.stop()


def rows(spark: SparkSession, root: Path, stream: str) -> Counter[int]:
    return Counter(row.a for row in spark.read.parquet(str(root / stream)).collect())


def _in_a_process(root: Path, stream: str) -> None:
    def query(spark: SparkSession) -> DataStreamWriter:
        reader = spark.readStream.schema("a long").option("maxFilesPerTrigger", 1)
        folder = str(root / STREAMS[stream])
        found = reader.json(folder) if stream == "orders" else reader.parquet(folder)
        kept = found.dropDuplicates(["a"])
        return (
            kept.writeStream.format("parquet")
            .option("path", str(root / stream))
            .trigger(processingTime="300 milliseconds")
        )

    with small_spark() as spark:
        run_stream(
            stream,
            query,
            catalog=f"sqlite:///{root}/catalog.db",
            storage=f"file://{root}/snapshots",
            live_root=f"{root}/live",
            spark=spark,
            restart_strategy=RestartStrategies.no_restart(),
            checkpointing=CheckpointConfig(interval=2_000, cleanup="RETAIN_ON_CANCELLATION"),
        )


if __name__ == "__main__":
    _in_a_process(Path(sys.argv[1]), sys.argv[2])
