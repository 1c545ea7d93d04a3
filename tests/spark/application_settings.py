"""Run as a program: a stateful query in an application of its own, and what it did with a backend's settings."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession
from spark_scenarios import Workload, aggregation

from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.query import start_query
from dagster_ckpt.spark.versions import Feature, installed_release

THREADS = 3
UPLOADS = "state-store-maintenance-high-priority"


def main(folder: Path) -> None:
    backend = EmbeddedRocksDBStateBackend(True)
    backend.set_db_storage_paths(str(folder / "disk-a"), str(folder / "disk-b"))
    has_uploads = Feature.UPLOAD_THREAD_SHARE in installed_release().features
    if has_uploads:
        backend.set_number_of_transfer_threads(THREADS)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "6")
        .config("spark.sql.streaming.stateStore.maintenanceInterval", "200ms")
        .config(map=backend.spark_settings())
        .getOrCreate()
    )
    work = Workload(aggregation, backend, folder)
    session = work.session(spark)  # applies the settings again: nothing is left to refuse
    query = start_query(work.writer(session, files_per_batch=8), "application", LiveDirectory(f"file://{folder}/live"))
    session.streams.get(query.query_id).processAllAvailable()
    databases = [str(path.relative_to(folder)) for path in folder.glob("disk-*/**/OPTIONS-*")]
    deadline = time.monotonic() + 120
    while len(workers := _uploading(spark)) < THREADS and has_uploads and time.monotonic() < deadline:
        time.sleep(0.1)
    query.stop()
    print(json.dumps({"databases": databases, "workers": len(workers) if has_uploads else None}))
    spark.stop()


def _uploading(spark: SparkSession) -> list[str]:
    assert spark._jvm is not None
    names = [thread.getName() for thread in spark._jvm.java.lang.Thread.getAllStackTraces().keySet()]
    return [name for name in names if name.startswith(UPLOADS)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
