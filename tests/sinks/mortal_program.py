"""One run of a stream into a real table, in a process that dies on the way.

`python -m tests.sinks.mortal_program JSON`. It kills itself at one step of a roll-back, or whoever started it does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from dagster_ckpt.catalog.streams import StreamRecords
from dagster_ckpt.sinks import delta_roll_back
from dagster_ckpt.sinks.iceberg import OpenIcebergTable
from dagster_ckpt.spark.versions import TableFormat
from tests.sinks.delta_program import DELTA, DeltaShops
from tests.sinks.iceberg_program import JDBC, IcebergShops, iceberg_settings
from tests.support.shop_tables import Shops
from tests.support.small_spark import SETTINGS

# The catalog of Iceberg that is used here needs no server.
_NO_REST = "http://127.0.0.1:9"


class When(StrEnum):
    """When a process dies at a step; `WITHIN` is so many milliseconds after the step has begun."""

    BEFORE = "before"
    WITHIN = "within"
    AFTER = "after"


@dataclass(frozen=True)
class Life:
    """One run.

    Attributes:
        table: The format of the table.
        base: The folder of all streams of the program.
        jars: The jars of the format.
        name: Name of the stream's folder.
        start_from: Where to start.
        files_per_batch: How the input is divided into batches.
        max_replayed_batches: See `CheckpointConfig`.
        step: The step of a roll-back at which the process dies; empty for none.
        when: When it dies there.
        within_ms: See `When`.
    """

    table: str
    base: str
    jars: str
    name: str
    start_from: str = "latest"
    files_per_batch: int = 1
    max_replayed_batches: int = 100
    step: str = ""
    when: str = When.BEFORE
    within_ms: int = 0

    def opened(self, spark: SparkSession) -> Shops:
        """The stream in a session."""
        folder = Path(self.base, self.name)
        return DeltaShops(spark, folder) if self.table == TableFormat.DELTA else IcebergShops(spark, folder, JDBC)

    @property
    def steps(self) -> dict[str, tuple[type, str]]:
        """The steps of a roll-back: the new directory is the stream's, the table follows, and that is recorded."""
        commits: dict[str, tuple[type, str]] = {
            TableFormat.DELTA: (delta_roll_back._Table, "commit"),
            TableFormat.ICEBERG: (OpenIcebergTable, "_move"),
        }
        return {
            "switch": (StreamRecords, "switch_live_directory"),
            "commit": commits[self.table],
            "finish": (StreamRecords, "restore_finished"),
        }

    def session(self) -> SparkSession:
        """A session with the format."""
        own = DELTA if self.table == TableFormat.DELTA else iceberg_settings(Path(self.base), _NO_REST)
        settings = {**SETTINGS, **own, "spark.jars": self.jars}
        return SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()


def die() -> None:
    """Die at once, and the JVM with this process."""
    os.killpg(0, signal.SIGKILL)
    time.sleep(60)


def dying_at(life: Life, step: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        if life.when == When.BEFORE:
            die()
        if life.when == When.WITHIN:
            threading.Timer(life.within_ms / 1000, die).start()
        result = step(*given, **named)
        die()
        return result

    return call


def main(life: Life) -> None:
    """Run the stream to the end of its input."""
    if life.step:
        owner, name = life.steps[life.step]
        setattr(owner, name, dying_at(life, getattr(owner, name)))
    shops = life.opened(life.session())
    shops.run(life.start_from, files_per_batch=life.files_per_batch, max_replayed_batches=life.max_replayed_batches)


if __name__ == "__main__":
    main(Life(**json.loads(sys.argv[1])))
