"""Programs that a supervisor launches: the next one checks its code beside the running one, and takes over from it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from dagster_ckpt import CheckpointConfig, Client, run_stream
from dagster_ckpt.catalog.records import ExecutionRecord, ExecutionStatus, RequestKind, RequestRecord
from dagster_ckpt.client.launching import START_REQUEST_VARIABLE
from dagster_ckpt.errors import RequestFailedError, SourceChangedError
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.small_spark import small_spark
from tests.support.small_stream import STREAM, SmallStream

pytestmark = pytest.mark.spark
DEADLINE_S = 120


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


class Launcher:
    """Launches a program for each start that is requested, as the supervisor sensor does; here they are threads."""

    def __init__(self, small: SmallStream, client: Client, patch: pytest.MonkeyPatch, pool: ThreadPoolExecutor) -> None:
        self.small, self.client, self._patch, self._pool = small, client, patch, pool

    def launch(self, request: RequestRecord, **writer: str) -> Future[Any]:
        described = self.small.writer(**writer)
        self._patch.setenv(START_REQUEST_VARIABLE, request.request_id)
        return self._pool.submit(
            run_stream,
            STREAM,
            lambda spark: described(spark).trigger(processingTime="0 seconds"),
            **self.small.places,
            spark=self.small.spark,
            checkpointing=CheckpointConfig(interval=60_000),
        )

    def restart(self, verify_batches: int = 0, **writer: str) -> tuple[Future[Any], Future[Any]]:
        """A person's restart, and the program that is launched for it."""
        start_from = StartFrom(verify_batches=verify_batches)
        asked = self._pool.submit(self.client.restart, STREAM, start_from=start_from, timeout_s=DEADLINE_S)
        return asked, self.launch(self.await_that(self._start), **writer)

    def newest(self) -> ExecutionRecord:
        return self.client.describe_stream(STREAM).executions[0]

    def await_that(self, holds: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while not (found := holds()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return found

    def has_read(self, files: int) -> bool:
        return self.small.rows().total() >= 10 * files if self.newest().status is ExecutionStatus.RUNNING else False

    def _start(self) -> RequestRecord | None:
        requests = self.client.describe_stream(STREAM).requests
        return next((each for each in requests if each.kind is RequestKind.START), None)


def test_the_next_program_takes_over_only_with_code_that_can_continue(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = SmallStream(spark, tmp_path)
    small.feed(1)
    small.run()
    small.feed(1)
    with ThreadPoolExecutor(4) as pool, Client(**small.places) as client:
        launcher = Launcher(small, client, monkeypatch, pool)
        first = launcher.launch(client.request_start(STREAM))
        launcher.await_that(lambda: launcher.has_read(2))
        old = launcher.newest()

        (tmp_path / "moved").mkdir()
        asked, refused = launcher.restart(folder="moved")
        with pytest.raises(SourceChangedError):
            refused.result(DEADLINE_S)
        with pytest.raises(RequestFailedError, match=r"SourceChangedError: .* is not started, nothing was changed"):
            asked.result(DEADLINE_S)
        small.feed(1)
        launcher.await_that(lambda: launcher.has_read(3))
        assert launcher.newest().execution_id == old.execution_id

        small.query = lambda rows: rows.where("a <> 3")
        asked, refused = launcher.restart(verify_batches=3)
        with pytest.raises(RequestFailedError, match=r"batch 0: output differs in 1 rows"):
            refused.result(DEADLINE_S)
        with pytest.raises(RequestFailedError, match=r"is not started, nothing was changed"):
            asked.result(DEADLINE_S)
        assert launcher.newest().execution_id == old.execution_id

        small.query = lambda rows: rows.where("a >= 0")
        asked, second = launcher.restart(verify_batches=3)
        asked.result(DEADLINE_S)
        first.result(DEADLINE_S)
        small.feed(1)
        launcher.await_that(lambda: launcher.has_read(4))
        assert launcher.newest().execution_id != old.execution_id
        client.stop(STREAM, savepoint=False)
        second.result(DEADLINE_S)

    assert small.rows() == Counter((5 * number + row,) for number in range(4) for row in range(10))
