"""A query that runs as fast as it can, with and without a snapshot every second, in turn.

`python -m benchmarks.running_query FOLDER ROUNDS`; the result is one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from pyspark.sql import functions as F

from benchmarks.engine import Engine
from benchmarks.live_directories import session

ROWS_OF_A_BATCH = 100_000
KEYS = 100_000
PARTITIONS = 4
# Short windows: what drifts (compilation, the heap, other work) is then the same in all of a round.
BATCHES_OF_A_WINDOW = 4
# A round: with snapshots or without. Spark's snapshots come every ten batches, and a window and what parts it from the
# next one are five: only so have both kinds the same batches of ten, the first five and the last.
ROUND = (True, False, False, True)
WARM_UP_BATCHES = 16
SNAPSHOTS_EVERY_S = 1.0
RETAINED = 3


@dataclass(frozen=True)
class Window:
    """Some batches of the query.

    Attributes:
        snapshots: Snapshots that were taken meanwhile.
        rows: Rows processed.
        wall_s: Seconds they took.
        cpu_s: CPU seconds of the JVM and of the driver's Python process.
        python_s: Those of the Python process alone, which takes the snapshots.
    """

    snapshots: int
    rows: int
    wall_s: float
    cpu_s: float
    python_s: float


class _Snapshotter:
    """Takes a snapshot every second, where it is told to, and makes room as a stream with three retained ones does."""

    def __init__(self, engine: Engine) -> None:
        self.taken = 0
        self._engine = engine
        self._locations: list[str] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        end = threading.Event()
        thread = threading.Thread(target=self._run, args=(end,))
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def _run(self, end: threading.Event) -> None:
        due = time.monotonic()
        while not end.wait(max(0.0, due - time.monotonic())):
            due += SNAPSHOTS_EVERY_S
            base = self._locations[-1] if self._locations else None
            self._locations.append(self._engine.checkpoint(base).location)
            self.taken += 1
            if len(self._locations) > RETAINED:
                self._engine.discard(self._locations.pop(0))


def main(folder: Path, rounds: int) -> list[Window]:
    """Run the query, and return its windows, in the order of `ROUND`."""
    spark = session("running query", PARTITIONS, {})
    engine = Engine(folder / "stream", f"file://{folder}/snapshots")
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS_OF_A_BATCH).load()
    query = (
        rows.select((F.hash("value") % KEYS).alias("k"), F.sha2(F.col("value").cast("string"), 256).alias("p"))
        .groupBy("k")
        .agg(F.count("*").alias("n"), F.max("p").alias("p"))
        .writeStream.outputMode("update")
        .format("noop")
        .option("checkpointLocation", str(engine.live))
        .start()
    )
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    snapshotter = _Snapshotter(engine)

    def wait_for(batch: int) -> None:
        commit = engine.live / "commits" / str(batch)
        while not commit.exists():
            if not query.isActive:
                raise RuntimeError(f"The query ended: {query.exception()}")
            time.sleep(0.01)

    def window(first: int) -> Window:
        taken, wall, cpu, python = snapshotter.taken, time.monotonic(), _cpu_s(processes), time.process_time()
        wait_for(first + BATCHES_OF_A_WINDOW - 1)
        # What has begun belongs to the window, and its snapshot to the figure.
        return Window(
            snapshotter.taken - taken,
            BATCHES_OF_A_WINDOW * ROWS_OF_A_BATCH,
            time.monotonic() - wall,
            _cpu_s(processes) - cpu,
            time.process_time() - python,
        )

    windows = []
    wait_for(WARM_UP_BATCHES - 1)
    engine.checkpoint()
    batch = WARM_UP_BATCHES + 1
    wait_for(batch - 1)
    for with_snapshots in ROUND * rounds:
        with snapshotter.running() if with_snapshots else contextlib.nullcontext():
            windows.append(window(batch))
        # The last snapshot may reach into the next batch, which counts for nobody.
        batch += BATCHES_OF_A_WINDOW + 1
        wait_for(batch - 1)
    query.stop()
    spark.stop()
    return windows


def _cpu_s(processes: list[psutil.Process]) -> float:
    return float(sum(times.user + times.system for times in (process.cpu_times() for process in processes)))


if __name__ == "__main__":
    print(json.dumps([asdict(window) for window in main(Path(sys.argv[1]), int(sys.argv[2]))]))
