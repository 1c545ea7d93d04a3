"""Real queries for the tests of this room: input, state format, and images taken while they run."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import DataStreamWriter

from dagster_ckpt.errors import CkptError, NothingCommittedError
from dagster_ckpt.options import EmbeddedRocksDBStateBackend, HashMapStateBackend, StateBackend
from dagster_ckpt.spark import (
    LiveDirectory,
    Materialized,
    apply_state_backend,
    materialize,
    roll_back,
    staged_cut,
    start_query,
    until_not_overtaken,
)

SCHEMA = "k long, v long, t timestamp"
FILES = 8

HEAP = HashMapStateBackend()
ROCKSDB = EmbeddedRocksDBStateBackend(False)
ROCKSDB_CHANGELOG = EmbeddedRocksDBStateBackend(True)
FORMAT_V2 = {"spark.sql.streaming.stateStore.checkpointFormatVersion": "2"}
ROCKSDB_V2 = EmbeddedRocksDBStateBackend(True, settings=FORMAT_V2)
ROCKSDB_V2_NO_CHANGELOG = EmbeddedRocksDBStateBackend(False, settings=FORMAT_V2)
ROCKSDB_JOIN_V3 = EmbeddedRocksDBStateBackend(True, settings={"spark.sql.streaming.join.stateFormatVersion": "3"})


def write_input(folder: Path) -> None:
    folder.mkdir()
    for number in range(FILES):
        rows = [{"k": k % 4, "v": number * 100 + k, "t": f"2024-01-01T00:{number:02}:{k * 4:02}Z"} for k in range(12)]
        path = folder / f"{number:03}.json"
        path.write_text("\n".join(map(json.dumps, rows)))
        # Spark reads files in the order of their times; out of order, rows would be late and dropped.
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))


@dataclass(frozen=True)
class Workload:
    """One query: from files to files, one input file a batch."""

    build: Callable[[DataFrame, DataFrame], DataFrame]
    backend: StateBackend
    folder: Path

    @property
    def output(self) -> Path:
        return self.folder / "output"

    def session(self, spark: SparkSession) -> SparkSession:
        session = spark.newSession()
        apply_state_backend(session, self.backend)
        return session

    def writer(self, spark: SparkSession, *, files_per_batch: int = 1) -> DataStreamWriter:
        left, right = (self._stream(spark, side, files_per_batch) for side in ("left", "right"))
        return (
            self.build(left, right)
            .writeStream.format("json")
            .option("path", str(self.output))
            .option("checkpointLocation", "/must/not/be/used")
            .queryName("must not be used")
        )

    def rows(self, spark: SparkSession) -> list[str]:
        return sorted(row.value for row in spark.read.text(str(self.output)).collect())

    def _stream(self, spark: SparkSession, side: str, files_per_batch: int) -> DataFrame:
        source = self.folder / side
        if not source.exists():
            write_input(source)
        stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", files_per_batch)
        return stream.json(str(source)).withWatermark("t", "20 seconds")


def aggregation(left: DataFrame, right: DataFrame) -> DataFrame:
    windows = left.groupBy(F.window("t", "30 seconds"), "k")
    return windows.agg(F.count("*").alias("n"), F.sum("v").alias("total"))


def join(left: DataFrame, right: DataFrame) -> DataFrame:
    within = F.expr("l.k = r.k AND l.t BETWEEN r.t AND r.t + INTERVAL 20 SECONDS")
    return left.alias("l").join(right.alias("r"), within).select("l.k", "l.v", F.col("r.v").alias("w"))


def stateless(left: DataFrame, right: DataFrame) -> DataFrame:
    return left.where("v % 3 != 0").select("k", "v")


@dataclass(frozen=True)
class TakenImage:
    """What an image of a cut would hold, in memory."""

    batch_id: int
    in_flight: int | None
    files: Mapping[str, bytes]
    sinks: list[dict[str, object]] = field(default_factory=list)

    def fill(self, write: Callable[[str, Iterable[bytes]], None]) -> None:
        for path, data in self.files.items():
            write(path, [data])

    def restore(self, target: LiveDirectory) -> Materialized:
        made = materialize(target, self.fill)
        for index, sink in enumerate(self.sinks):
            roll_back(str(sink["path"]), self.batch_id, made.sinks.get(index, ()))
        return made


def take_image(live: LiveDirectory, *, carry_in_flight: bool, output: Path | None = None) -> TakenImage:
    return until_not_overtaken(lambda: _take(live, carry_in_flight=carry_in_flight, output=output))


def _take(live: LiveDirectory, *, carry_in_flight: bool, output: Path | None) -> TakenImage:
    sinks = (f"FileSink[file:{output}]",) if output else ()
    with staged_cut(live, carry_in_flight=carry_in_flight, sinks=sinks) as staged:
        files = {}
        for file in staged.hold(staged.files):
            files[file.path] = file.read()
            assert len(files[file.path]) == file.size
        return TakenImage(staged.cut.batch_id, staged.cut.in_flight, files, staged.cut.properties["sinks"])


def images_of_a_running_query(spark: SparkSession, work: Workload, live: LiveDirectory) -> list[TakenImage]:
    """Run a query over all its input, while another thread takes one image after the other."""
    images: dict[tuple[int, int | None], TakenImage] = {}
    errors: list[CkptError] = []
    done = threading.Event()

    def take_all() -> None:
        carry = False
        while not done.is_set() and not errors:
            try:
                image = take_image(live, carry_in_flight=carry, output=work.output)
                images.setdefault((image.batch_id, image.in_flight), image)
            except NothingCommittedError:
                continue
            except CkptError as error:
                errors.append(error)
            carry = not carry

    thread = threading.Thread(target=take_all)
    session = work.session(spark)
    query = start_query(work.writer(session), "uninterrupted", live)
    thread.start()
    try:
        session.streams.get(query.query_id).processAllAvailable()
    finally:
        done.set()
        thread.join()
        query.stop()
    assert errors == []
    return [images[key] for key in sorted(images, key=lambda key: (key[0], key[1] or 0))]


def run_to_the_end(spark: SparkSession, work: Workload, live: LiveDirectory, *, files_per_batch: int = 1) -> None:
    writer = work.writer(work.session(spark), files_per_batch=files_per_batch).trigger(availableNow=True)
    query = start_query(writer, "resumed", live)
    while not query.wait(0.5):
        pass
    assert query.exception() is None
