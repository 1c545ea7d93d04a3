"""A stream that is handed over from old to new code while its input goes on, in one session: each row names its code.

Both codes are programs that a supervisor launches; here they are threads.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import CheckpointConfig, Client, run_stream
from dagster_ckpt.catalog.records import ExecutionRecord, ExecutionStatus, RequestKind, RequestRecord
from dagster_ckpt.client.launching import START_REQUEST_VARIABLE
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.small_stream import STREAM, SmallStream, dedup

DEADLINE_S = 240
OLD, NEW = 1, 2


def differs_as_declared(what: str, rows: DataFrame) -> DataFrame:
    """The release changes the output, and not the state."""
    return rows.where("false") if what == "output" else rows


class HandOver:
    """Old and new code of a stream.

    Args:
        spark: The session.
        root: Folder of everything that it has.
        write: The sink, for rows and a folder; default: Parquet.
        query: What the code does with its rows; default: each once.
        read: The source, of a folder; default: a file in a batch.
    """

    def __init__(
        self,
        spark: SparkSession,
        root: Path,
        write: Callable[[DataFrame, str], DataStreamWriter] | None = None,
        *,
        query: Callable[[DataFrame], DataFrame] = dedup,
        read: Callable[[str], DataFrame] | None = None,
    ) -> None:
        self.small = SmallStream(spark, root)
        self.query, self.write = query, write or self.small.write
        self.read = read or (lambda folder: self.small.read(spark, folder))

    def described(self, version: int, *, folder: str = "in", output: str = "out") -> DataStreamWriter:
        """The query of a code, whose rows name it in `code`."""
        return self.write(self.query(self.read(folder)).selectExpr("*", f"{version} AS code"), output)

    @contextmanager
    def running(self) -> Iterator[Running]:
        """Its programs, which are stopped in the end."""
        with ThreadPoolExecutor(4) as pool, Client(**self.small.places) as client:
            running = Running(self, client, pool)
            try:
                yield running
            finally:
                running.stop_all()


class Running:
    """What happens to it while it runs."""

    def __init__(self, of: HandOver, client: Client, pool: ThreadPoolExecutor) -> None:
        self.of, self.client, self._pool = of, client, pool
        self._programs: list[Future[Any]] = []

    @property
    def newest(self) -> ExecutionRecord:
        return self.client.describe_stream(STREAM).executions[0]

    def start_old(self) -> None:
        os.environ.pop(START_REQUEST_VARIABLE, None)
        self._launch(OLD)
        self.await_that(lambda: self.client.catalog.executions.latest(STREAM))

    def hand_over(self, *, verify_batches: int = 2) -> None:
        """As a person's restart, and the supervisor that launches its program."""
        start_from = StartFrom(verify_batches=verify_batches)
        asked = self._pool.submit(self.client.restart, STREAM, start_from=start_from, timeout_s=DEADLINE_S)
        os.environ[START_REQUEST_VARIABLE] = self.await_that(self._start).request_id
        self._launch(NEW)
        asked.result(DEADLINE_S)
        self._programs.pop(0).result(DEADLINE_S)

    def await_that(self, holds: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while not (found := holds()):
            for each in self._programs:
                if each.done():
                    each.result()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return found

    def has_committed(self, batch: int) -> bool:
        """Whether the newest program has committed a batch and waits for more."""
        newest = self.newest
        done = newest.newest_batch
        return newest.status is ExecutionStatus.RUNNING and done is not None and done >= batch

    def is_idle(self) -> bool:
        return self.newest.status is ExecutionStatus.RUNNING and bool((self.newest.progress or {}).get("idle"))

    @contextmanager
    def feeding(self, every_s: float = 0.5) -> Iterator[None]:
        """Files come in."""
        over = threading.Event()

        def feed() -> None:
            while not over.wait(every_s):
                self.of.small.feed(1)

        thread = threading.Thread(target=feed)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def stop_all(self) -> None:
        os.environ.pop(START_REQUEST_VARIABLE, None)
        if any(not each.done() for each in self._programs):
            self.client.stop(STREAM, savepoint=False)
        for each in self._programs:
            each.result(DEADLINE_S)

    def _start(self) -> RequestRecord | None:
        requests = self.client.describe_stream(STREAM).requests
        return next((each for each in requests if each.kind is RequestKind.START), None)

    def _launch(self, version: int) -> None:
        self._programs.append(
            self._pool.submit(
                run_stream,
                STREAM,
                lambda _spark: self.of.described(version).trigger(processingTime="0 seconds"),
                **self.of.small.places,
                spark=self.of.small.spark,
                checkpointing=CheckpointConfig(interval=60_000),
                code_version=str(version),
                unexpected_rows=differs_as_declared,
            )
        )


def each_row_once(of: HandOver, rows: Counter[tuple[int, int]]) -> int:
    """Check the rows `(id, code)` of a stream of distinct ids; returns the last batch of the old code."""
    last = max(id_ for id_, code in rows if code == OLD)
    boundary = (last - 9) // 5
    expected = Counter((id_, OLD if id_ <= last else NEW) for id_ in range(5 * of.small.files + 5))
    assert rows == expected
    assert last == 5 * boundary + 9
    return boundary


def hand_over_while_files_come(of: HandOver) -> None:
    """Three batches of the old code, a hand-over while files come in, and what is left by the new code."""
    of.small.feed(3)
    with of.running() as running:
        running.start_old()
        running.await_that(lambda: running.has_committed(2))
        old = running.newest.execution_id
        with running.feeding():
            running.hand_over()
        of.small.feed(1)
        running.await_that(lambda: running.has_committed(of.small.files - 1))
        assert running.newest.execution_id != old
        assert (running.newest.code_version, running.newest.status) == (str(NEW), ExecutionStatus.RUNNING)
