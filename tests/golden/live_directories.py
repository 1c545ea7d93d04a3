"""Live directories as one version of Spark writes them: `python -m tests.golden.live_directories`.

Run it with the pyspark of each version; it writes `spark-<version>.tar.xz` beside itself. The rows of the uninterrupted
run are in `rows.json`: all versions must give the same.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.config.state_backend import HashMapStateBackend, StateBackend
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.query import start_query
from dagster_ckpt.spark.query.session import apply_state_backend
from dagster_ckpt.spark.versions import Feature, installed_release
from tests.support.small_spark import small_spark

GOLDEN = Path(__file__).parent
ROWS = GOLDEN / "rows.json"
SCHEMA = "k long, v long, t timestamp"
STREAM = "golden"
# Batches in the directories; the rest of the input is for the query that goes on.
WRITTEN, FILES = 5, 8
SETTINGS = {
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.sql.streaming.stateStore.minDeltasForSnapshot": "3",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # Spark's default; the session of the tests has another.
    "spark.sql.streaming.fileSource.log.compactInterval": "10",
}
Rows = dict[str, list[list[Any]]]
_NAMED_SCHEMA = re.compile(rb'file:[^"]+/golden/live/([^"]+/_stateSchema/)')


@dataclass(frozen=True)
class Query:
    """A query of the input.

    Attributes:
        build: What it computes.
        backend: Where it keeps its state.
        mode: Its output mode.
        needed: Features of Spark that it needs.
        settings: Further settings, with which it is started.
    """

    build: Callable[[DataFrame], DataFrame]
    backend: StateBackend
    mode: str = "append"
    needed: frozenset[Feature] = frozenset()
    settings: dict[str, str] = field(default_factory=dict)


def counts(rows: DataFrame) -> DataFrame:
    return rows.groupBy("k").agg(F.count("*").alias("n"), F.max("v").alias("largest"))


def total(rows: DataFrame) -> DataFrame:
    return rows.agg(F.count("*").alias("n"), F.sum("v").alias("total"))


def windows(rows: DataFrame) -> DataFrame:
    windowed = rows.groupBy(F.window("t", "30 seconds"), "k").agg(F.count("*").alias("n"))
    return windowed.select(F.col("window.start").cast("long").alias("at"), "k", "n")


def sessions(rows: DataFrame) -> DataFrame:
    sessions = rows.groupBy(F.session_window("t", "10 seconds"), "k").agg(F.sum("v").alias("total"))
    return sessions.select(F.col("session_window.start").cast("long").alias("at"), "k", "total")


def firsts(rows: DataFrame) -> DataFrame:
    return rows.selectExpr("v % 37 AS seen").dropDuplicates(["seen"])


def pairs(rows: DataFrame) -> DataFrame:
    left, right = rows.alias("l"), rows.where("v % 3 <> 0").alias("r")
    within = F.expr("l.k = r.k AND l.t BETWEEN r.t AND r.t + INTERVAL 20 SECONDS")
    return left.join(right, within).select("l.k", "l.v", F.col("r.v").alias("w"))


def limited(rows: DataFrame) -> DataFrame:
    return rows.select("k", "v").limit(70)


HEAP = HashMapStateBackend()
ROCKSDB = EmbeddedRocksDBStateBackend(False)
CHANGELOG = EmbeddedRocksDBStateBackend(True)
FORMAT_2 = EmbeddedRocksDBStateBackend(True, settings={"spark.sql.streaming.stateStore.checkpointFormatVersion": "2"})
JOIN = "spark.sql.streaming.join.stateFormatVersion"
QUERIES = {
    "counts-heap": Query(counts, HEAP, "update"),
    "counts-changelog": Query(counts, CHANGELOG, "update"),
    "counts-format-2": Query(counts, FORMAT_2, "update", frozenset({Feature.CHECKPOINT_FORMAT_2})),
    "total-rocksdb": Query(total, ROCKSDB, "update"),
    "windows-rocksdb": Query(windows, ROCKSDB),
    "sessions-heap": Query(sessions, HEAP),
    "firsts-changelog": Query(firsts, CHANGELOG),
    "pairs-heap": Query(pairs, HEAP, settings={JOIN: "2"}),
    "pairs-changelog": Query(pairs, CHANGELOG, settings={JOIN: "2"}),
    "pairs-join-3": Query(pairs, CHANGELOG, needed=frozenset({Feature.JOIN_STATE_3}), settings={JOIN: "3"}),
    "limited-heap": Query(limited, HEAP),
}


def lay_input(folder: Path) -> Path:
    """The input as every version has read it: only the names of the files and their times matter."""
    shutil.copytree(GOLDEN / "input", folder)
    for number, path in enumerate(sorted(folder.iterdir())):
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    return folder


def run(spark: SparkSession, query: Query, live: LiveDirectory, files: Path, *, own_settings: bool = True) -> Rows:
    """Run a query until it has read all its input; returns the rows of each batch."""
    rows: Rows = {}

    def write(batch: DataFrame, number: int) -> None:
        rows[str(number)] = sorted(list(row) for row in batch.collect())

    session = spark.newSession()
    if own_settings:
        apply_state_backend(session, query.backend)
    for name, value in (SETTINGS | (query.settings if own_settings else {})).items():
        session.conf.set(name, value)
    # By name only, and as a pattern: of a plain folder Spark wants all files of its log to lie in it.
    reader = session.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).option("fileNameOnly", True)
    stream = query.build(reader.json(f"{files}/*.json").withWatermark("t", "20 seconds"))
    writer = stream.writeStream.outputMode(query.mode).foreachBatch(write).trigger(availableNow=True)
    started = start_query(writer, STREAM, live)
    while not started.wait(0.5):
        pass
    assert started.exception() is None, started.exception()
    return rows


@contextmanager
def unpacked(minor: str) -> Iterator[Path]:
    """What one version wrote: `<query>` is a live directory."""
    with tempfile.TemporaryDirectory(prefix="dagster-ckpt-golden-") as folder:
        with tarfile.open(GOLDEN / f"spark-{minor}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
        live = Path(folder) / "live"
        for path in live.glob("*/state/*/_metadata/**/*"):
            # Operators whose state schema has files of its own name them by their place.
            if path.is_file() and _NAMED_SCHEMA.search(named := path.read_bytes()):
                path.write_bytes(_NAMED_SCHEMA.sub(rb"file:" + bytes(live) + rb"/\1", named))
        yield live


def main() -> None:
    release = installed_release()
    all_rows: dict[str, Rows] = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    with tempfile.TemporaryDirectory() as scratch, small_spark() as spark:
        root = Path(scratch)
        files = lay_input(root / "input")
        later = root / "later"
        later.mkdir()
        for name, query in QUERIES.items():
            if not query.needed <= release.features:
                continue
            live = LiveDirectory(str(root / "golden/live" / name))
            for path in sorted(files.iterdir())[WRITTEN:]:
                path.rename(later / path.name)
            rows = run(spark, query, live, files)
            whole = root / "whole" / name
            shutil.copytree(root / "golden/live" / name, whole)
            for path in later.iterdir():
                path.rename(files / path.name)
            rows |= run(spark, query, LiveDirectory(str(whole)), files)
            assert sorted(map(int, rows)) == list(range(FILES)), (name, sorted(rows))
            assert all_rows.setdefault(name, rows) == rows, f"{release} gives other rows: {name}"
            print(f"{release}: {name}", flush=True)
        if ROWS.exists():
            # Another version may have written its own since.
            all_rows = json.loads(ROWS.read_text()) | all_rows
        ROWS.write_text(json.dumps(all_rows, indent=None, sort_keys=True) + "\n")
        preset = 9 | lzma.PRESET_EXTREME
        with tarfile.open(GOLDEN / f"spark-{release.minor}.tar.xz", "w:xz", preset=preset) as archive:
            archive.add(root / "golden/live", "live", filter=_plain)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    # Hadoop's checksums of its local files say nothing that these tests look at.
    if Path(member.name).name.startswith(".") and member.name.endswith(".crc"):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main()
