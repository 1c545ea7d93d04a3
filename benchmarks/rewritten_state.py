"""What a rewrite of state costs: `python -m benchmarks.rewritten_state FOLDER KEYS`.

Beside it stands what no rewrite can be faster than: reading the state once with Spark's reader of
state, and taking one full snapshot. The result is one line of JSON. Needs Spark 4.2 or later.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from benchmarks.driver_memory import FORGET_THE_PEAK
from benchmarks.engine import Engine
from benchmarks.live_directories import session
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.state_files import HEAP, ROCKSDB
from dagster_ckpt.spark.query.query import jvm_pid, start_query
from dagster_ckpt.state.rewriting import rewrite_state
from dagster_ckpt.state.stopped_state import StateShape

PARTITIONS = 8
CHANGES = {
    "8 to 16 partitions": StateShape(ROCKSDB, 16),
    "8 to 4 partitions": StateShape(ROCKSDB, 4),
    "checkpoint format v1 to v2": StateShape(ROCKSDB, PARTITIONS, 2),
    "RocksDB to heap": StateShape(HEAP, PARTITIONS),
}


@dataclass(frozen=True)
class Step:
    """One thing that was done.

    Attributes:
        what: What.
        wall_s: How long it took.
        jvm_bytes: Peak of the resident memory of the JVM, driver and executors in one.
        python_bytes: That of the Python driver.
    """

    what: str
    wall_s: float
    jvm_bytes: int
    python_bytes: int


class _Meter:
    def __init__(self, spark: SparkSession) -> None:
        self._processes = (str(jvm_pid(spark)), "self")
        self.steps: list[Step] = []

    def measure(self, what: str, work: Callable[[], object]) -> None:
        for process in self._processes:
            Path(f"/proc/{process}/clear_refs").write_text(FORGET_THE_PEAK)
        began = time.perf_counter()
        work()
        wall_s = time.perf_counter() - began
        self.steps.append(Step(what, wall_s, *(_peak(process) for process in self._processes)))


def main(folder: Path, keys: int) -> list[Step]:
    """Let a query make state of so many keys in one batch, and rewrite it.

    Args:
        folder: An empty folder.
        keys: Number of keys.
    """
    spark = session("rewritten", PARTITIONS)
    engine = Engine(folder / "stream", f"file://{folder}/snapshots")
    meter = _Meter(spark)
    meter.measure(
        "the query's batch that made the state",
        lambda: _run_query(spark, folder, LiveDirectory(str(engine.live)), keys),
    )
    live = LiveDirectory(str(engine.live))
    reader = spark.read.format("statestore").option("batchId", live.positions().commit or 0)
    reading = reader.load(live.spark_location).agg(F.sum(F.xxhash64("key", "value").cast("decimal(38,0)")))
    meter.measure("read once with Spark's reader of state", reading.collect)
    meter.measure("full snapshot", engine.checkpoint)
    made = {}
    for number, (what, shape) in enumerate(CHANGES.items()):
        made[shape] = LiveDirectory(f"file://{folder}/rewritten-{number}")
        meter.measure(what, partial(rewrite_state, spark, live, made[shape], shape=shape))
    heap, back = made[CHANGES["RocksDB to heap"]], LiveDirectory(f"file://{folder}/back")
    rocksdb = StateShape(ROCKSDB, PARTITIONS)
    meter.measure("heap to RocksDB", partial(rewrite_state, spark, heap, back, shape=rocksdb))
    spark.stop()
    return meter.steps


def _run_query(spark: SparkSession, folder: Path, live: LiveDirectory, keys: int) -> None:
    rows = spark.range(keys).selectExpr("id AS k", "concat('customer-', id) AS name", "id % 97 AS v")
    rows.write.parquet(str(folder / "input"))
    stream = spark.readStream.schema("k long, name string, v long").parquet(str(folder / "input"))
    counts = stream.groupBy("k", "name").agg(F.count("*").alias("n"), F.sum("v").alias("v"))
    writer = counts.writeStream.outputMode("update").format("noop").trigger(availableNow=True)
    query = start_query(writer, "rewritten", live)
    while not query.wait(0.2):
        pass
    failure = query.exception()
    if failure is not None:
        raise RuntimeError(failure)


def _peak(process: str) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{process}/status does not say VmHWM.")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    found = main(place, int(sys.argv[2]))
    shutil.rmtree(place / "stream")
    print(json.dumps([asdict(step) for step in found]))
