"""Programs that a supervisor launches: the next one checks its code beside the running one, and takes over from it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dagster_ckpt import CheckpointConfig, Client, run_stream
from dagster_ckpt.catalog.records import ExecutionRecord, ExecutionStatus, RequestKind, RequestRecord
from dagster_ckpt.client.launching import START_REQUEST_VARIABLE
from dagster_ckpt.errors import RequestFailedError, SourceChangedError
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.handed_over import NEW, OLD, HandOver, each_row_once, hand_over_while_files_come
from tests.support.small_spark import lay_file, small_spark
from tests.support.small_stream import STREAM, SmallStream, dedup

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


def windowed(rows: DataFrame) -> DataFrame:
    late = rows.selectExpr("timestamp_seconds(a) AS at", "a").withWatermark("at", "2 seconds")
    return late.groupBy(F.window("at", "5 seconds")).agg(F.count("*").alias("rows")).selectExpr("window.start", "rows")


@pytest.mark.thorough
def test_rows_are_there_once_if_files_come_in_during_the_hand_over(spark: SparkSession, tmp_path: Path) -> None:
    of = HandOver(spark, tmp_path)
    hand_over_while_files_come(of)
    assert each_row_once(of, of.small.rows()) >= 2  # type: ignore[arg-type]


def neighbours(rows: DataFrame, others: DataFrame) -> DataFrame:
    """Pairs of a row and the next one, of two sources."""
    left = rows.dropDuplicates(["a"]).selectExpr("a", "timestamp_seconds(a) AS at").withWatermark("at", "20 seconds")
    right = others.selectExpr("a + 1 AS b", "timestamp_seconds(a) AS since").withWatermark("since", "20 seconds")
    near = F.expr("a = b AND since BETWEEN at - INTERVAL 5 SECONDS AND at")
    return left.join(right, near).select("a", "b")


@pytest.mark.thorough
@pytest.mark.parametrize(("query", "sources", "last"), [(dedup, 1, 6), (windowed, 1, 7), (neighbours, 2, 7)])
def test_rows_equal_a_run_of_the_old_code_up_to_the_boundary_and_of_the_new_code_after_it(
    spark: SparkSession, tmp_path: Path, query: Callable[..., DataFrame], sources: int, last: int
) -> None:
    of = HandOver(spark, tmp_path)
    # The same folder for each.
    of.query, of.read = lambda rows: rows, lambda folder: query(*(of.small.read(spark, folder) for _ in range(sources)))
    of.small.feed(4)
    with of.running() as running:
        running.start_old()
        running.await_that(lambda: running.has_committed(3) and running.is_idle())
        running.hand_over()
        of.small.feed(3)
        running.await_that(lambda: running.has_committed(last) and running.is_idle())

    plain = tmp_path / "plain"
    plain.mkdir()
    for code, files in ((OLD, range(4)), (NEW, range(4, 7))):
        for number in files:
            lay_file(plain, number, [{"a": 5 * number + row} for row in range(10)])
        of.small.run_plainly("plainly", lambda _: of.described(code, folder="plain", output="plain out"))  # noqa: B023
    assert of.small.rows() == of.small.rows("plain out")
    assert {row[-1] for row in of.small.rows()} == {OLD, NEW}
