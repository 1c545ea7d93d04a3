"""What an exact replay costs: lost batches run again without output, beside the same batches the first time.

`python -m benchmarks.replayed FOLDER ROUNDS`; the result is one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from benchmarks.live_directories import session
from dagster_ckpt import CheckpointConfig, Client, run_stream
from dagster_ckpt.catalog import journal
from dagster_ckpt.catalog.journal import JournalRecords, PlannedBatch
from dagster_ckpt.catalog.records import LeaseRecord
from tests.support.small_spark import lose

BATCHES, ROWS_OF_A_BATCH, PARTITIONS = 20, 50_000, 4
# Before the savepoint.
FIRST_BATCHES = 2
FIRST_TIME, REPLAYED, RUN_AGAIN = (
    "the first time",
    "replayed, the sink keeps its rows",
    "not replayed: the sink is rolled back",
)
STREAM = "bench"


@dataclass
class Measured:
    """What was measured.

    Attributes:
        walls: Seconds from the start of the stream to its end, by what it did, of each round.
        lags_s: Of each batch, the seconds from Spark's entry in the offset log to the commit of the journal.
        notes_s: The seconds of each write to the journal.
        bytes_of_a_batch: What the journal stores of each batch.
    """

    walls: dict[str, list[float]] = field(default_factory=dict)
    lags_s: list[float] = field(default_factory=list)
    notes_s: list[float] = field(default_factory=list)
    bytes_of_a_batch: list[int] = field(default_factory=list)


class Lost:
    """A stream that loses its live directory.

    Args:
        spark: The session.
        folder: An empty folder.
    """

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.places: dict[str, Any] = {
            "catalog": f"sqlite:///{folder}/catalog.db",
            "storage": f"file://{folder}/snapshots",
            "live_root": f"{folder}/live",
        }
        (folder / "input").mkdir(parents=True)

    def feed(self, first: int, beyond: int) -> None:
        """Write a file of new keys for each batch."""
        for batch in range(first, beyond):
            keys = np.arange(batch * ROWS_OF_A_BATCH, (batch + 1) * ROWS_OF_A_BATCH)
            unfinished = self.folder / "input" / f".{batch}"
            pq.write_table(pa.table({"k": keys}), unfinished)
            unfinished.rename(self.folder / "input" / f"{batch:05}.parquet")

    def query(self, spark: SparkSession) -> DataStreamWriter:
        """Each key once, into files."""
        rows = spark.readStream.schema("k long").option("maxFilesPerTrigger", 1).parquet(f"{self.folder}/input")
        writer = rows.dropDuplicates(["k"]).writeStream.format("parquet").option("path", f"{self.folder}/output")
        return writer.trigger(availableNow=True)

    def run(self, max_replayed_batches: int = 100) -> float:
        """Run the stream to the end of its input; returns the seconds."""
        began = time.perf_counter()
        checkpointing = CheckpointConfig(max_replayed_batches=max_replayed_batches)
        run_stream(STREAM, self.query, **self.places, spark=self.spark, checkpointing=checkpointing)
        return time.perf_counter() - began

    def lose_the_directory(self) -> None:
        """Delete every live directory."""
        for live in (self.folder / "live" / STREAM).glob("live-*"):
            lose(live)

    def play(self) -> dict[str, float]:
        """Run batches, lose them, and get them back, in both ways."""
        self.feed(0, FIRST_BATCHES)
        self.run()
        with Client(**self.places) as client:
            client.trigger_savepoint(STREAM, label="before")
        self.feed(FIRST_BATCHES, FIRST_BATCHES + BATCHES)
        walls = {FIRST_TIME: self.run()}
        for what, max_replayed_batches in ((REPLAYED, 100), (RUN_AGAIN, 0)):
            self.lose_the_directory()
            walls[what] = self.run(max_replayed_batches)
        return walls

    def planned_at_s(self, batch: int) -> float:
        """When Spark planned a batch."""
        (entry,) = (self.folder / "live" / STREAM).glob(f"live-*/offsets/{batch}")
        return entry.stat().st_mtime


def main(folder: Path, rounds: int) -> Measured:
    """Measure."""
    spark = session("replayed", PARTITIONS)
    measured = Measured()
    # The first one compiles.
    for number in range(rounds + 1):
        lost = Lost(spark, folder / str(number))
        found = Measured()
        note = JournalRecords.note
        JournalRecords.note = _watched(note, lost, found)  # type: ignore[method-assign]
        try:
            walls = lost.play()
        finally:
            JournalRecords.note = note  # type: ignore[method-assign]
        if number:
            for what, wall_s in walls.items():
                measured.walls.setdefault(what, []).append(wall_s)
            measured.lags_s += found.lags_s
            measured.notes_s += found.notes_s
            measured.bytes_of_a_batch += found.bytes_of_a_batch
    spark.stop()
    return measured


def _watched(note: Callable[..., None], lost: Lost, found: Measured) -> Callable[..., None]:
    known: set[int] = set()

    def call(records: JournalRecords, lease: LeaseRecord, batches: list[PlannedBatch], **more: Any) -> None:
        began = time.perf_counter()
        note(records, lease, batches, **more)
        found.notes_s.append(time.perf_counter() - began)
        now = time.time()
        for batch in batches:
            # Not that of a later run, which plans none of them again.
            if batch.batch_id not in known:
                known.add(batch.batch_id)
                found.lags_s.append(now - lost.planned_at_s(batch.batch_id))
                found.bytes_of_a_batch.append(len(journal._packed(batch)))

    return call


if __name__ == "__main__":
    print(json.dumps(asdict(main(Path(sys.argv[1]), int(sys.argv[2])))))
