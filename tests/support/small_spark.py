"""A Spark session for a dozen rows, and files for its file source."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.log.level": "OFF",
    # Compiling costs more than it gains on so few rows.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


def start_jvm() -> None:
    """Start the JVM without settings: those that it is started with stay in force for every later session in it."""
    SparkContext._ensure_initialized()


@contextmanager
def small_spark(settings: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """A session with these settings besides its own; stopped at the end."""
    with pytest.MonkeyPatch.context() as patch:
        # Python workers must find what the tests find: pandas, pyarrow, protobuf.
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        start_jvm()
        session = SparkSession.builder.master("local[2]").config(map={**SETTINGS, **(settings or {})}).getOrCreate()
        yield session
        session.stop()


TASKS_END_S = 120


def unload_stores(spark: SparkSession) -> None:
    """Let go of the state of queries that have ended, as their processes would: nothing uploads a file of it later."""
    jvm: Any = spark.sparkContext._jvm
    # A task of a job that has failed may still run, and a store that is closed beneath it ends the JVM.
    executors = spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos
    deadline = time.monotonic() + TASKS_END_S
    while any(each.numRunningTasks() for each in executors()):
        assert time.monotonic() < deadline, "tasks of the ended queries still run"
        time.sleep(0.01)
    stores = getattr(jvm.org.apache.spark.sql.execution.streaming.state, "StateStore$")
    # Not `stop`, which may wait five minutes for a maintenance that waits for it.
    getattr(stores, "MODULE$").unloadAll()
    # What a thread has begun it finishes: it makes the folder again that a test has deleted meanwhile.
    idle = 0
    while idle < 2:
        assert time.monotonic() < deadline, "the maintenance of the state of the ended queries still runs"
        idle = 0 if _maintenance_runs(jvm) else idle + 1
        time.sleep(0.01)


def _maintenance_runs(jvm: Any) -> bool:
    return any(
        ".doMaintenance" in str(frame.toString())
        for entry in jvm.java.lang.Thread.getAllStackTraces().entrySet()
        if entry.getKey().getName().startswith("state-store-maintenance")
        for frame in entry.getValue()
    )


def lay_file(folder: Path, number: int, rows: Iterable[Mapping[str, Any]]) -> None:
    """Lay a JSON file at once, never half of it; Spark takes files in the order of their numbers."""
    unfinished = folder / f".{number}"
    unfinished.write_text("\n".join(map(json.dumps, rows)))
    # Spark orders files by their times; out of order, rows would be late and dropped.
    os.utime(unfinished, (1_700_000_000 + number, 1_700_000_000 + number))
    unfinished.replace(folder / f"{number:04}.json")


def lose(live: Path) -> None:
    """Delete a live directory. A state store of the stopped query may still upload a file there."""
    for _ in range(9):
        shutil.rmtree(live, ignore_errors=True)
        if not live.exists():
            return
    shutil.rmtree(live)
