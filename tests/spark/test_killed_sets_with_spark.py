"""Running queries that read each other, and the client that takes their sets and restarts from them, all killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import CheckpointConfig, Client, RestartStrategies, run_stream
from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.database import Database
from dagster_ckpt.catalog.records import ExecutionStatus
from dagster_ckpt.spark.versions import TableFormat
from tests.sinks.delta_program import DELTA
from tests.support.executioner import CHANGES, Executioner
from tests.support.small_spark import SETTINGS, lay_file
from tests.support.table_jars import fetch_jars, needs_jar

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
SUMMARY = "rows"


class Graph:
    """A chain of running queries, each in a process of its own; every value arrives once in each output.

    Args:
        root: An empty folder.
        sink: Spark's name of the format that they write and read.
    """

    program: ClassVar[str] = "tests.spark.test_killed_sets_with_spark"

    def __init__(self, root: Path, sink: str) -> None:
        self.root, self.sink = root, sink
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
                self.running[stream] = self._launch(stream)
                self.wait(partial(self.runs_or_ended, stream))

    def _launch(self, *work: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", self.program, str(self.root), self.sink, *work]
        with (self.root / f"{work[0]}.log").open("ab") as log:
            # In a group of its own, with its JVM.
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def has_read(self, values: int) -> dict[str, Counter[int]]:
        """The values of each output, as soon as the last one has so many."""
        self.running[SUMMARY] = reader = self._launch(SUMMARY, str(values))
        self.wait(lambda: reader.poll() is not None)
        assert reader.returncode == 0, self.said()
        found = json.loads((self.root / f"{SUMMARY}.json").read_text())
        return {stream: Counter(values) for stream, values in found.items()}

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


@pytest.mark.parametrize(
    "sink",
    [
        "parquet",
        pytest.param("delta", marks=needs_jar(TableFormat.DELTA)),
        pytest.param("iceberg", marks=needs_jar(TableFormat.ICEBERG)),
    ],
)
def test_no_kill_leaves_streams_that_do_not_belong_together(tmp_path: Path, sink: str) -> None:
    if sink != "parquet":
        fetch_jars(TableFormat(sink), tmp_path / "jars")
    live_and_kill(Graph(tmp_path, sink), STREAMS)


def live_and_kill(graph: Graph, outputs: Collection[str], *, rounds: int = ROUNDS) -> None:
    """Take sets and go back to them, with kills, and compare what these streams have written in the end."""
    chance = random.Random(5)
    taken: list[str] = []
    try:
        for number in range(rounds):
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
        graph.has_read(len(expected))
        graph.stop()
        assert graph.has_read(len(expected)) == dict.fromkeys(outputs, expected)
    finally:
        graph.stop()


class Stage:
    """What a process of the graph does with Spark."""

    outputs: ClassVar[Collection[str]] = tuple(STREAMS)

    def __init__(self, root: Path, sink: str) -> None:
        self.root, self.sink = root, sink
        of_the_sink = {"delta": DELTA, "iceberg": iceberg(root)}.get(sink, {})
        jars = ",".join(str(path) for path in sorted((root / "jars").glob("*.jar")))
        settings = {**SETTINGS, **of_the_sink, **({"spark.jars": jars} if jars else {})}
        self.spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()

    def place(self, stream: str) -> str:
        return f"books.db.{stream}" if self.sink == "iceberg" else str(self.root / stream)

    def query(self, stream: str) -> DataStreamWriter:
        of_files = self.spark.readStream.schema("a long").option("maxFilesPerTrigger", 1)
        upstream = STREAMS[stream]
        if stream == "orders":
            found = of_files.json(str(self.root / upstream))
        elif self.sink == "parquet":
            found = of_files.parquet(self.place(upstream))
        else:
            table = self.spark.readStream.format(self.sink).option("streaming-max-files-per-micro-batch", 1)
            found = table.option("maxFilesPerTrigger", 1).load(self.place(upstream))
        written = found.dropDuplicates(["a"]).writeStream.format(self.sink).option("path", self.place(stream))
        return written.trigger(processingTime="300 milliseconds")

    def run(self, stream: str) -> None:
        if self.sink != "parquet":
            self._make_table(stream)
        run_stream(
            stream,
            lambda _: self.query(stream),
            catalog=f"sqlite:///{self.root}/catalog.db",
            storage=f"file://{self.root}/snapshots",
            live_root=f"{self.root}/live",
            spark=self.spark,
            restart_strategy=RestartStrategies.no_restart(),
            checkpointing=CheckpointConfig(interval=2_000, cleanup="RETAIN_ON_CANCELLATION"),
        )

    def _make_table(self, stream: str) -> None:
        """The next stage cannot read a table that is not there yet."""
        name = self.place(stream) if self.sink == "iceberg" else f"delta.`{self.place(stream)}`"
        self.spark.sql(f"CREATE TABLE IF NOT EXISTS {name} (a long) USING {self.sink}")

    def tell(self, values: int) -> None:
        while len(self._rows("totals")) < values:
            time.sleep(0.5)
        found = {stream: sorted(self._rows(stream)) for stream in self.outputs}
        (self.root / f"{SUMMARY}.json").write_text(json.dumps(found))

    def _rows(self, stream: str) -> list[int]:
        with suppress(AnalysisException):
            if self.sink == "iceberg":
                # Else what this session has read first, as long as it is read again within half a minute.
                self.spark.catalog.refreshTable(self.place(stream))
            return [row.a for row in self._read(stream).collect()]
        return []

    def _read(self, stream: str) -> DataFrame:
        return self.spark.read.format(self.sink).load(self.place(stream))


def iceberg(root: Path) -> dict[str, str]:
    """A catalog in a folder, which several processes can change at a time."""
    books = "spark.sql.catalog.books"
    return {
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        books: "org.apache.iceberg.spark.SparkCatalog",
        f"{books}.type": "hadoop",
        f"{books}.warehouse": f"{root}/books",
    }


def main(kind: type[Stage]) -> None:
    stage = kind(Path(sys.argv[1]), sys.argv[2])
    if sys.argv[3] == SUMMARY:
        stage.tell(int(sys.argv[4]))
    else:
        stage.run(sys.argv[3])


if __name__ == "__main__":
    main(Stage)
