"""Snapshots that earlier code wrote (tests/golden) stay readable, restorable and resumable."""

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from spark_scenarios import ROCKSDB_CHANGELOG, SCHEMA

from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.snapshot.manifest import FORMAT_VERSION
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.snapshot.store import SnapshotStore
from dagster_ckpt.snapshot.writer import METADATA_NAME
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import materialize
from dagster_ckpt.spark.query.query import start_query
from dagster_ckpt.spark.query.session import apply_state_backend

GOLDEN = Path(__file__).parents[1] / "golden"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())
SNAPSHOTS: dict[str, Any] = EXPECTED["snapshots"]

every_snapshot = pytest.mark.parametrize("snapshot", SNAPSHOTS)


def store_of(snapshot: str) -> SnapshotStore:
    return open_store(FileSystemCheckpointStorage(f"file://{GOLDEN}/{snapshot.partition('/')[0]}"), "golden")


def version_of(metadata: Path) -> int:
    """As docs/snapshot-format.md describes it, section 2."""
    with zipfile.ZipFile(metadata) as archive:
        return int(json.loads(archive.read("manifest.json"))["format_version"])


def restored(snapshot: str, folder: Path) -> LiveDirectory:
    live = LiveDirectory(str(folder / "live-0"))
    extract = store_of(snapshot).extract
    materialize(live, lambda filler: extract(f"file://{GOLDEN}/{snapshot}", lambda file, data: filler(file.path, data)))
    return live


def test_there_is_a_set_of_each_format_version() -> None:
    assert {snapshot.partition("/")[0] for snapshot in SNAPSHOTS} == {f"format-{FORMAT_VERSION}"}


@every_snapshot
def test_it_is_whole_and_of_the_version_its_folder_names(snapshot: str) -> None:
    store = store_of(snapshot)
    location = f"file://{GOLDEN}/{snapshot}"
    assert snapshot.startswith(f"format-{version_of(GOLDEN / snapshot / METADATA_NAME)}/")
    assert store.manifest(location).header.batch_id == SNAPSHOTS[snapshot]["batch_id"]
    assert store.verify(location) == []


@every_snapshot
def test_it_restores_to_the_bytes_that_spark_wrote(snapshot: str, tmp_path: Path) -> None:
    live = restored(snapshot, tmp_path)
    found = {path: live.folder.read(path) for path, _ in live.folder.find()}
    assert (
        sorted([path, len(data), blake3(data).hexdigest()] for path, data in found.items())
        == SNAPSHOTS[snapshot]["files"]
    )
    assert inspect_live_directory(live).status is LiveStatus.GOOD


@pytest.mark.spark
def test_spark_resumes_from_each_to_the_rows_of_the_uninterrupted_run(spark: SparkSession, tmp_path: Path) -> None:
    input_folder = tmp_path / "input"
    shutil.copytree(GOLDEN / "input", input_folder)
    for number, path in enumerate(sorted(input_folder.iterdir())):
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    for snapshot, expected in SNAPSHOTS.items():
        folder = tmp_path / snapshot
        folder.mkdir(parents=True)
        later = {n: rows for n, rows in EXPECTED["rows"].items() if int(n) > expected["batch_id"]}
        assert resumed(spark, restored(snapshot, folder), input_folder) == later


def resumed(spark: SparkSession, live: LiveDirectory, input_folder: Path) -> dict[str, list[list[int]]]:
    """The rows of each batch from here to the end."""
    rows: dict[str, list[list[int]]] = {}

    def write(batch: DataFrame, number: int) -> None:
        rows[str(number)] = sorted(list(row) for row in batch.collect())

    session = spark.newSession()
    apply_state_backend(session, ROCKSDB_CHANGELOG)
    # By name only, and as a pattern: of a plain folder Spark wants all files of its log to lie in it.
    reader = session.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).option("fileNameOnly", True)
    counts = (
        reader.json(f"{input_folder}/*.json").groupBy("k").agg(F.count("*").alias("n"), F.max("v").alias("largest"))
    )
    writer = counts.writeStream.outputMode("update").foreachBatch(write).trigger(availableNow=True)
    query = start_query(writer, "golden", live)
    while not query.wait(0.5):
        pass
    assert query.exception() is None, query.exception()
    return rows
