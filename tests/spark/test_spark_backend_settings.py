"""A state backend's options, read back from the query that runs with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from application_settings import THREADS
from pyspark.sql import SparkSession
from spark_scenarios import Workload, aggregation

from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend, PredefinedOptions, RocksDBStateBackend
from dagster_ckpt.config.state_backend import (
    CustomStateBackend,
    FsStateBackend,
    HashMapStateBackend,
    MemoryStateBackend,
    StateBackend,
)
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry
from dagster_ckpt.spark.query.query import start_query
from dagster_ckpt.spark.versions import Feature
from tests.support.needs import needs

pytestmark = pytest.mark.spark

HEAP = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
MIB = 1024 * 1024
# RocksDB's own defaults, as far as Spark leaves them.
DEFAULTS = {
    "max_open_files": -1,
    "write_buffer_size": 64 * MIB,
    "max_write_buffer_number": 2,
    "block_size": 4 * 1024,
}
HIGH_MEMORY = DEFAULTS | {"max_write_buffer_number": 4, "block_size": 128 * 1024}


@dataclass(frozen=True)
class Running:
    """A query that runs: its handle, its live directory, and Spark's package of state stores."""

    handle: Any
    folder: Path
    classes: Any

    @property
    def store_conf(self) -> Any:
        """The configuration that Spark's state store operators run with."""
        session = self.handle._jsq.streamingQuery().lastExecution().sparkSession()
        return self.classes.StateStoreConf.apply(session.sessionState().conf())

    @property
    def rocksdb_conf(self) -> Any:
        return self.classes.RocksDBConf.apply(self.store_conf)

    @property
    def pinned_provider(self) -> str | None:
        where = self.folder / "offsets" / "0"
        return parse_offset_entry(where.read_bytes(), str(where)).provider_class

    def files(self, pattern: str) -> list[Path]:
        return sorted((self.folder / "state" / "0").glob(f"[0-9]*/{pattern}"))

    def database_options(self) -> dict[str, str]:
        """What RocksDB itself wrote down of the options it was opened with."""
        with ZipFile(self.files("*.zip")[-1]) as snapshot:
            (name,) = [name for name in snapshot.namelist() if name.startswith("OPTIONS-")]
            lines = snapshot.read(name).decode().splitlines()
        return {name.strip(): value for name, _, value in (line.partition("=") for line in lines)}


@contextmanager
def running(spark: SparkSession, backend: StateBackend, folder: Path) -> Iterator[Running]:
    work = Workload(aggregation, backend, folder)
    session = work.session(spark)
    live = folder / "live"
    query = start_query(work.writer(session, files_per_batch=8), "asked", LiveDirectory(f"file://{live}"))
    handle = session.streams.get(query.query_id)
    try:
        handle.processAllAvailable()
        assert spark._jvm is not None
        yield Running(handle, live, spark._jvm.org.apache.spark.sql.execution.streaming.state)
    finally:
        query.stop()


@pytest.mark.thorough(but="PredefinedOptions.FLASH_SSD_OPTIMIZED-*")
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (PredefinedOptions.DEFAULT, DEFAULTS),
        (PredefinedOptions.SPINNING_DISK_OPTIMIZED, DEFAULTS),
        (PredefinedOptions.SPINNING_DISK_OPTIMIZED_HIGH_MEM, HIGH_MEMORY),
        (PredefinedOptions.FLASH_SSD_OPTIMIZED, DEFAULTS),
    ],
)
def test_the_database_of_a_running_query_has_the_predefined_options(
    spark: SparkSession, tmp_path: Path, choice: PredefinedOptions, expected: dict[str, int]
) -> None:
    backend = RocksDBStateBackend("file:///not/used/by/spark")
    backend.set_predefined_options(choice)
    with running(spark, backend, tmp_path) as query:
        found = query.database_options()
        cache_mb = query.rocksdb_conf.blockCacheSizeMB()
    assert {name: int(found[name]) for name in expected} == expected
    assert cache_mb == (256 if choice is PredefinedOptions.SPINNING_DISK_OPTIMIZED_HIGH_MEM else 8)
    # What the table calls so anyway is so, and what it calls absent is RocksDB's own.
    assert (found["compaction_style"], found["level_compaction_dynamic_level_bytes"]) == (
        "kCompactionStyleLevel",
        "true",
    )
    assert (found["use_fsync"], found["max_background_jobs"]) == ("false", "2")
    assert (int(found["target_file_size_base"]), int(found["max_bytes_for_level_base"])) == (64 * MIB, 256 * MIB)
    assert found["min_write_buffer_number_to_merge"] == "1"


def test_a_factorys_settings_and_further_ones_reach_the_database(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "config"))
    backend = EmbeddedRocksDBStateBackend(settings={"spark.sql.streaming.stateStore.rocksdb.blockSizeKB": 32})
    backend.set_predefined_options(PredefinedOptions.SPINNING_DISK_OPTIMIZED_HIGH_MEM)
    backend.set_options("options_factories.TwiceTheCache")
    with running(spark, backend, tmp_path) as query:
        assert query.rocksdb_conf.blockCacheSizeMB() == 512
        assert query.database_options()["block_size"] == str(32 * 1024)


@pytest.mark.parametrize(("incremental", "written"), [(True, "*.changelog"), (False, "*.zip")])
def test_incremental_checkpointing_decides_what_each_batch_writes(
    spark: SparkSession, tmp_path: Path, incremental: bool, written: str
) -> None:
    with running(spark, EmbeddedRocksDBStateBackend(incremental), tmp_path) as query:
        assert query.rocksdb_conf.enableChangelogCheckpointing() is incremental
        assert query.store_conf.providerClass() == ROCKSDB
        assert query.files(written)
        assert incremental or not query.files("*.changelog")


@pytest.mark.thorough(but="HashMap*")
@pytest.mark.parametrize(
    ("backend", "provider"),
    [
        (HashMapStateBackend(), HEAP),
        (MemoryStateBackend(), HEAP),
        (FsStateBackend("file:///not/used/by/spark"), HEAP),
        (CustomStateBackend(ROCKSDB), ROCKSDB),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_running_query_has_the_backends_provider_and_pins_it(
    spark: SparkSession, tmp_path: Path, backend: StateBackend, provider: str
) -> None:
    with running(spark, backend, tmp_path) as query:
        assert query.store_conf.providerClass() == provider
        assert query.pinned_provider == provider
        assert bool(query.files("*.delta")) is (provider == HEAP)


@needs(Feature.UPLOAD_THREAD_SHARE)
def test_transfer_threads_are_the_threads_of_sparks_uploads(spark: SparkSession, tmp_path: Path) -> None:
    backend = EmbeddedRocksDBStateBackend()
    backend.set_number_of_transfer_threads(5)
    with running(spark, backend, tmp_path) as query:
        total = query.store_conf.numStateStoreMaintenanceThreads()
        assert round(total * query.store_conf.snapshotToCleanupThreadRatio()) == 5
        assert total == 6  # one is left to clean up


@pytest.mark.thorough
def test_what_spark_reads_at_the_start_of_an_application_has_its_effect_in_a_new_one(tmp_path: Path) -> None:
    """Local directories and the pool of upload threads are made once in a JVM, so this one has a JVM of its own."""
    program = Path(__file__).with_name("application_settings.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # One working database a state partition, below one of the two directories.
    assert len(found["databases"]) == 6
    assert all(path.startswith(("disk-a/", "disk-b/")) for path in found["databases"])
    # A Spark without threads that only upload refuses their number.
    assert found["workers"] in (THREADS, None)
