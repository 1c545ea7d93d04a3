"""Live directories for the measurements: made by real Spark queries, once, and kept in the bench's folder.

The query is `parquet files, one a batch -> group by key -> count and max of a 100-character payload -> noop`, in
update mode. Batch 0 loads every key once; each later batch updates a share of them, drawn at random. A directory is
kept as it was at the end of each stage, so that a measurement can let a copy of it grow from one to the next.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

PAYLOAD_BYTES = 50
MAINTENANCE_S = 5
SEED = 20130101
BEFORE_ALL_FEEDS_S = 1_700_000_000

ROCKSDB_WITH_CHANGELOG: Mapping[str, str] = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
# The default manager starts a `chmod` for each file where Hadoop's native library is missing; this one
# writes the same files (as it does on HDFS), and the directory is made four times as fast.
QUICKLY_MADE: Mapping[str, str] = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.stateStore.maintenanceInterval": f"{MAINTENANCE_S}s",
}


@dataclass(frozen=True)
class Shape:
    """What a live directory is to hold.

    Attributes:
        keys: Keys in the state.
        partitions: Partitions of the state.
        changed: Keys that each batch after the first updates.
        stages: Batches at the end of each stage; the directory is kept at each.
    """

    keys: int
    partitions: int
    changed: int
    stages: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of its folder."""
        stages = "-".join(map(str, self.stages))
        return f"{self.keys}-keys-{self.partitions}-partitions-{self.changed}-changed-{stages}-batches"


@dataclass(frozen=True)
class KeptDirectory:
    """A live directory as it was at the end of each stage; nobody writes to these."""

    shape: Shape
    stages: tuple[Path, ...]


def kept_directory(shape: Shape, bench: Path) -> KeptDirectory:
    """Find the directory of a shape, or let Spark make it (minutes for a million keys in 200 partitions).

    It is made by a process of its own: the JVM must be gone before anything is measured.

    Args:
        shape: What it holds.
        bench: The bench's folder.
    """
    folder = bench / "live" / shape.name
    kept = KeptDirectory(shape, tuple(folder / f"D{number}" for number in range(1, len(shape.stages) + 1)))
    if not (folder / "complete").exists():
        print(f"Spark makes a live directory: {shape} ...", flush=True)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "benchmarks.live_directories", str(folder), json.dumps(asdict(shape))]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        (folder / "complete").touch()
    return kept


def session(name: str, partitions: int, conf: Mapping[str, str] = QUICKLY_MADE, cores: int = 2) -> SparkSession:
    """A local Spark session with RocksDB and changelogs."""
    # Python workers need the packages that this process has.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(f"local[{cores}]").appName(name)
    settings = {
        **ROCKSDB_WITH_CHANGELOG,
        **conf,
        "spark.sql.shuffle.partitions": str(partitions),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "3g",
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("ERROR")
    return made


def write_feed(feed: Path, shape: Shape, *, first: int, last: int) -> None:
    """Write the input of batches `first` to `last - 1`, one file each."""
    feed.mkdir(parents=True, exist_ok=True)
    for batch in range(first, last):
        random = np.random.default_rng((SEED, batch))
        keys = np.arange(shape.keys) if batch == 0 else random.choice(shape.keys, shape.changed, replace=False)
        payloads = [random.bytes(PAYLOAD_BYTES).hex() for _ in range(len(keys))]
        unfinished = feed / f".{batch}"
        pq.write_table(pa.table({"k": keys.astype("int64"), "p": payloads}), unfinished)
        # The file source takes files by their time of change.
        os.utime(unfinished, (BEFORE_ALL_FEEDS_S + batch, BEFORE_ALL_FEEDS_S + batch))
        unfinished.rename(feed / f"{batch:05d}.parquet")


def _make(folder: Path, shape: Shape) -> None:
    feed, live = folder / "feed", folder / "live"
    spark = session("live directory", shape.partitions)
    batches_before = 0
    for number, batches in enumerate(shape.stages, start=1):
        write_feed(feed, shape, first=batches_before, last=batches)
        batches_before = batches
        rows = spark.readStream.schema("k long, p string").option("maxFilesPerTrigger", 1).parquet(str(feed))
        query = (
            rows.groupBy("k")
            .agg(F.count("*").alias("n"), F.max("p").alias("p"))
            .writeStream.outputMode("update")
            .format("noop")
            .trigger(availableNow=True)
            .option("checkpointLocation", str(live))
            .start()
        )
        query.awaitTermination()
        _wait_until_quiet(live)
        if batches != shape.stages[-1]:
            subprocess.run(["cp", "-a", str(live), str(folder / f"D{number}")], check=True)
    spark.stop()
    live.rename(folder / f"D{len(shape.stages)}")


def _wait_until_quiet(live: Path) -> None:
    """Wait until maintenance has nothing left to upload: it goes on after the last commit."""
    before: list[str] = []
    while (now := sorted(str(path) for path in live.rglob("*"))) != before:
        before = now
        time.sleep(2 * MAINTENANCE_S)


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    _make(Path(sys.argv[1]), Shape(**{**given, "stages": tuple(given["stages"])}))
