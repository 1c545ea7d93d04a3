"""How long readers wait for the next batch while a release replaces another one: by hand-over, and by a restart.

`python -m benchmarks.handing_over FOLDER TIMES`; the result is one line of JSON. Each release is a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from benchmarks.live_directories import session
from dagster_ckpt import CheckpointConfig, Client, run_stream
from dagster_ckpt.catalog.records import HANDS_OVER, RequestKind
from dagster_ckpt.client.launching import START_REQUEST_VARIABLE

TRIGGER_S, FILE_EVERY_S, ROWS_OF_A_FILE, KEYS, PARTITIONS = 0.5, 0.25, 1_000, 100_000, 4
HANDED_OVER, RESTARTED = "handed over, two batches verified", "stopped with a savepoint, then started"
STREAM = "bench"
PATIENCE_S = 300.0
BATCHES_BETWEEN = 10


def places_in(folder: Path) -> dict[str, Any]:
    """Where the stream has its things."""
    return {
        "catalog": f"sqlite:///{folder}/catalog.db",
        "storage": f"file://{folder}/snapshots",
        "live_root": f"{folder}/live",
    }


def run_release(folder: Path, version: int) -> None:
    """Run a release in this process: it counts by key, and its rows have the version of the code."""

    def query(spark: SparkSession) -> DataStreamWriter:
        rows = spark.readStream.schema("k long").option("maxFilesPerTrigger", 10).parquet(f"{folder}/input")
        counted = rows.groupBy("k").count().selectExpr("*", f"{version} AS version")
        writer = counted.writeStream.outputMode("update").format("noop")
        return writer.trigger(processingTime=f"{TRIGGER_S} seconds")

    run_stream(
        STREAM,
        query,
        **places_in(folder),
        spark=session("handing over", PARTITIONS),
        checkpointing=CheckpointConfig(interval=5_000),
        code_version=str(version),
        unexpected_rows=_of_state,
    )


class Releases:
    """Releases of a stream that replace each other.

    Args:
        folder: Folder of everything that it has.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "input").mkdir(parents=True)
        self._client = Client(**places_in(folder))
        self._version = 0
        self._running: subprocess.Popen[bytes] | None = None

    @contextmanager
    def fed(self) -> Iterator[None]:
        """Files come in."""
        over = threading.Event()

        def feed() -> None:
            number = 0
            while not over.wait(FILE_EVERY_S):
                keys = np.random.default_rng(number).integers(KEYS, size=ROWS_OF_A_FILE)
                unfinished = self.folder / "input" / f".{number}"
                pq.write_table(pa.table({"k": keys}), unfinished)
                unfinished.rename(self.folder / "input" / f"{number:06}.parquet")
                number += 1

        thread = threading.Thread(target=feed)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def start(self) -> None:
        """Launch the first release."""
        self._launch({})
        self._await_batches()

    def hand_over(self) -> float:
        """The next release takes over; returns the seconds between the last batch of the old and the first of the new.

        Raises:
            RuntimeError: The next release was refused.
        """
        old = self._running
        assert old is not None
        arguments = {"start_from": "latest", HANDS_OVER: True, "verify_batches": 2}
        start = self._client.catalog.requests.submit(STREAM, RequestKind.START, arguments=arguments, origin="bench")
        self._launch({START_REQUEST_VARIABLE: start.request_id})
        old.wait(PATIENCE_S)
        return self._gap()

    def restart(self) -> float:
        """Stop the running release, and launch the next one; returns the same."""
        assert self._running is not None
        self._client.stop(STREAM)
        self._running.wait(PATIENCE_S)
        self._launch({})
        return self._gap()

    def stop(self) -> None:
        """End it."""
        if self._running is not None and self._running.poll() is None:
            self._client.stop(STREAM, savepoint=False)
            self._running.wait(PATIENCE_S)
        self._client.close()

    def _launch(self, environment: dict[str, str]) -> None:
        self._version += 1
        command = [sys.executable, "-m", "benchmarks.handing_over", "--release", str(self.folder), str(self._version)]
        with (self.folder / "said.log").open("ab") as log:
            self._running = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)

    def _gap(self) -> float:
        """From the last commit before the newest release began to its own first one."""
        started_at = self._await_batches()
        times = self._commit_times()
        first = next(number for number, at in enumerate(times) if at > started_at)
        return times[first] - times[first - 1]

    def _await_batches(self) -> float:
        """Wait until the newest release has committed some; returns when its execution started."""
        started: list[float] = []

        def has_committed() -> bool:
            if self._running is not None and self._running.poll() is not None:
                raise RuntimeError((self.folder / "said.log").read_text()[-4_000:])
            latest = self._client.catalog.executions.latest(STREAM)
            if latest is None or latest.code_version != str(self._version) or latest.live_directory is None:
                return False
            started[:] = [latest.started_at_ms / 1000]
            return sum(at > started[0] for at in self._commit_times()) >= BATCHES_BETWEEN

        _until(has_committed)
        return started[0]

    def _commit_times(self) -> list[float]:
        times = []
        for path in self._live().glob("commits/[0-9]*"):
            # Spark deletes the oldest ones.
            with suppress(FileNotFoundError):
                times.append(path.stat().st_mtime)
        return sorted(times)

    def _live(self) -> Path:
        (live,) = (self.folder / "live" / STREAM).glob("live-*")
        return live


def _of_state(what: str, rows: DataFrame) -> DataFrame:
    """The version in the output is what a release changes."""
    return rows.where("false") if what == "output" else rows


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_S:.0f} s")
        time.sleep(0.2)


def main(folder: Path, times: int) -> dict[str, list[float]]:
    """Measure; returns the seconds of each replacement, by how it was done."""
    releases = Releases(folder / "releases")
    gaps: dict[str, list[float]] = {HANDED_OVER: [], RESTARTED: []}
    with releases.fed():
        releases.start()
        try:
            for _ in range(times):
                gaps[HANDED_OVER].append(releases.hand_over())
                gaps[RESTARTED].append(releases.restart())
        finally:
            releases.stop()
    return gaps


if __name__ == "__main__":
    if sys.argv[1] == "--release":
        run_release(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
