"""What the transactional Kafka sink makes of the columns of a batch; no broker is asked."""

from __future__ import annotations

import ast
import importlib
import os
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dagster_ckpt.errors import OptionError, StorageAccessError
from dagster_ckpt.sinks.kafka import executor_write, transaction, writer
from dagster_ckpt.sinks.kafka.marker import Epoch, Marker, Transactions
from dagster_ckpt.sinks.kafka.transaction import Record
from dagster_ckpt.sinks.kafka.writer import (
    _interrupted_in_brief,
    _workers_of_their_own,
    division_of,
    hash_of_each_writer,
    record_columns,
)
from tests.support.small_spark import small_spark

HEADERS = pyarrow.list_(pyarrow.struct([("key", pyarrow.string()), ("value", pyarrow.binary())]))
EVERY_COLUMN = (
    "'k' key, 'v' value, array(struct('h' key, cast('x' as binary) value)) headers, 2 partition, 'other' topic"
)


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as spark:
        yield spark


def rows_of(places: list[int], **columns: object) -> pyarrow.RecordBatch:
    return pyarrow.RecordBatch.from_pydict({**columns, executor_write.PLACE: places})


def test_a_column_that_a_query_lacks_is_sent_as_none() -> None:
    batches = [rows_of([0, 1], value=[b"a", None]), rows_of([2, executor_write.END], value=[b"b", None])]
    assert list(executor_write.records_of(batches)) == [Record(b"a"), Record(None), Record(b"b")]


def test_each_column_of_a_row_goes_into_its_record() -> None:
    columns = {
        "partition": pyarrow.array([2, None, None], pyarrow.int32()),
        "headers": pyarrow.array([[{"key": "h", "value": b"x"}, {"key": "h", "value": None}], None, None], HEADERS),
        "key": pyarrow.array([b"k", None, None]),
        "value": pyarrow.array([b"v", b"w", None]),
    }
    assert list(executor_write.records_of([rows_of([0, 1, executor_write.END], **columns)])) == [
        Record(b"v", b"k", [("h", b"x"), ("h", None)], 2),
        Record(b"w"),
    ]


class Share:
    """A session without a broker, which notes what becomes of its transaction."""

    last = None

    def __init__(self) -> None:
        self.ended: list[str] = []

    def begin_epoch(self) -> None: ...

    def marker(self) -> Marker:
        return Marker(4, "q", "d", "s", 1, 1, "me", 1)

    def send(self, records: Iterable[Record]) -> int:
        return len(list(records))

    def commit(self, batch: int, entry: str) -> None:
        self.ended.append(f"committed {batch}")
        self.last = batch

    def abandon(self) -> None:
        self.ended.append("aborted")

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("arrived", "ended"),
    [
        ([[0, 1, executor_write.END]], "committed 5"),
        ([[0, 1], [executor_write.END]], "committed 5"),
        ([[0, 1], [executor_write.END], []], "committed 5"),
        ([[executor_write.END]], "committed 5"),
        ([[0, 1]], "aborted"),
        ([[0, 1], [2]], "aborted"),
        ([[]], "aborted"),
        ([], "aborted"),
    ],
)
def test_a_share_whose_rows_end_early_is_not_committed(
    arrived: list[list[int]], ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_share = Share()
    monkeypatch.setattr(executor_write, "Session", lambda *_: of_share)
    monkeypatch.setattr(executor_write, "marker_before_share", lambda *_: of_share.marker())
    monkeypatch.setattr(executor_write, "sessions", {})
    target = Transactions({}, "t", "p", 1, "d", "s", "q", Epoch(1, 1), "me")
    rows = [rows_of(places, value=[b"a"] * len(places)) for places in arrived]
    is_whole = ended != "aborted"

    with nullcontext() if is_whole else pytest.raises(StorageAccessError, match="ended this task before its last row"):
        executor_write.write_share(target, 0, 5, executor_write.records_of(rows))

    assert of_share.ended == [ended]


class Queue:
    """A producer whose queue becomes shorter as told."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return self.lengths[0]

    def flush(self, _: float) -> int:
        if len(self.lengths) > 1:
            self.lengths.pop(0)
        return len(self)


@pytest.mark.parametrize(
    ("lengths", "left"),
    [
        ([0], 0),
        ([3, 2, 1, 0], 0),
        # Longer than the patience in all, but never without progress for as long.
        ([9, 9, 8, 8, 7, 7, 6, 6, 0], 0),
        ([3, 2, 2], 2),
    ],
)
def test_queued_records_are_waited_for_as_long_as_they_become_fewer(
    lengths: list[int], left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(1000))
    monkeypatch.setattr(transaction.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(transaction, "PATIENCE_S", 4.0)
    queue = Queue(lengths)
    transaction._flush(queue)  # type: ignore[arg-type]
    assert len(queue) == left


def test_the_delivery_timeout_of_the_java_client_is_accepted() -> None:
    target = Transactions({"delivery.timeout.ms": "120000"}, "t", "p", 1, "d", "s", "q", Epoch(1, 1), "me")
    assert len(transaction._producer(target, "id")) == 0


def test_a_worker_forgets_the_archives_of_spark_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyspark.zip", "py4j-0.10.9.9-src.zip", "jobs.zip"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(f"module_of_{name.split('-')[0].split('.')[0]}.py", "")
        monkeypatch.syspath_prepend(str(tmp_path / name))
    assert importlib.import_module("module_of_jobs")

    executor_write._forget_archives_of_spark()

    kept = {Path(path).name for path in sys.path_importer_cache if Path(path).parent == tmp_path}
    assert kept == {"jobs.zip"}
    assert importlib.import_module("module_of_pyspark")
    assert importlib.import_module("module_of_py4j")


@pytest.mark.spark
@pytest.mark.parametrize(
    ("columns", "taken"),
    [
        ("'v' value", ["value"]),
        ("'v' value, 1 other", ["value"]),
        (EVERY_COLUMN, ["key", "value", "headers", "partition"]),
    ],
)
@pytest.mark.parametrize("writers", [1, 2])
def test_the_columns_that_kafka_takes_are_selected(
    spark: SparkSession, columns: str, taken: list[str], writers: int
) -> None:
    batch = spark.sql(f"select {columns}")
    records = division_of(batch, writers).of(batch)
    assert set(records.columns) & set(Record._fields) == {*taken}
    row, *ends = sorted(records.collect(), key=lambda row: row[executor_write.PLACE])
    assert row["value"] == b"v"
    assert [row[executor_write.PLACE] for row in ends] == [executor_write.END] * writers


@pytest.mark.thorough(but="*-200-2")
@pytest.mark.spark
@pytest.mark.parametrize("writers", [1, 2, 5])
@pytest.mark.parametrize("rows", [0, 1, 200])
@pytest.mark.parametrize(
    "columns", ["cast(null as string) key, cast(id as string) value", "cast(id % 5 as string) key, 'v' value"]
)
def test_each_share_has_its_rows_in_order_and_one_end(
    spark: SparkSession, columns: str, rows: int, writers: int
) -> None:
    batch = spark.range(0, rows, 1, 3).selectExpr("cast(id as int) partition", *columns.split(", "))
    shares = division_of(batch, writers).of(batch).withColumn("writer", F.spark_partition_id())
    arrived = shares.collect()
    by_writer = [[row for row in arrived if row["writer"] == writer] for writer in range(writers)]

    assert [[row[executor_write.PLACE] for row in rows if row["partition"] is None] for rows in by_writer] == [
        [executor_write.END]
    ] * writers
    numbers = [[row["partition"] for row in rows[:-1]] for rows in by_writer]
    assert all(each == sorted(each) for each in numbers)
    assert sorted(number for each in numbers for number in each) == list(range(rows))
    assert len({(bytes(row["key"]), row["writer"]) for row in arrived if row["key"]}) == min(rows, 5) * ("%" in columns)


@pytest.mark.thorough(but="2")
@pytest.mark.spark
@pytest.mark.parametrize("writers", [1, 2])
def test_a_job_that_was_planned_once_writes_the_rows_of_each_batch(
    spark: SparkSession, writers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another stream than that of the tests of its Python workers.
    target = Transactions({}, "t", "p", writers, "d", "planned", "q", Epoch(1, 1), "me")
    name, _ = executor_write.batch_property(target.owner, 0, "")

    def noted(_: Transactions) -> Callable[[Iterable[pyarrow.RecordBatch]], Iterator[pyarrow.RecordBatch]]:
        def write(rows: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
            from pyspark import TaskContext

            context: Any = TaskContext.get()
            arrived = [
                row for batch in rows for row in batch.select(["key", "value", executor_write.PLACE]).to_pylist()
            ]
            file = tmp_path / f"{context.getLocalProperty(name)} {context.partitionId()}"
            file.write_text(repr([(row["key"], row["value"]) for row in arrived]))
            assert [row[executor_write.PLACE] for row in arrived].index(executor_write.END) == len(arrived) - 1
            return iter(())

        return write

    def batch_of(rows: DataFrame) -> DataFrame:
        return rows.selectExpr("1 unused", "cast(id as string) key", "concat('v', id) value")

    def written(batch: int) -> list[Any]:
        shares = [tmp_path / f"{batch} digest-{batch} {writer}" for writer in range(writers)]
        return [row for file in shares for row in ast.literal_eval(file.read_text())[:-1]]

    monkeypatch.setattr(writer, "share_writer", noted)
    adaptive = spark.conf.get("spark.sql.adaptive.enabled")
    first = batch_of(spark.range(0, 3, 1, 2))
    job = writer.BatchJob(first, target)
    nothing = DataFrame(spark._jsparkSession.emptyDataFrame(), spark).selectExpr("1L id")
    batches = [first, batch_of(spark.range(3, 7, 1, 3)), batch_of(nothing), batch_of(spark.sql("select null id"))]
    for number, batch in enumerate(batches):
        job.run(batch, number, f"digest-{number}")

    numbers = [sorted(int(key) for key, _ in written(batch)) for batch in (0, 1)]
    assert numbers == [[0, 1, 2], [3, 4, 5, 6]]
    assert written(2) == []
    assert written(3) == [(None, None)]
    assert spark.conf.get("spark.sql.adaptive.enabled") == adaptive


def test_a_driver_whose_threads_share_those_of_the_jvm_is_refused() -> None:
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(_gateway=object()))
    with pytest.raises(OptionError, match="PYSPARK_PIN_THREAD is false"):
        writer.refuse_shared_threads(session)


@pytest.mark.spark
@pytest.mark.parametrize("ansi", ["true", "false"])
@pytest.mark.parametrize("columns", ["binary('k') key, 'v' value", "'k' key, binary('v') value"])
def test_key_and_value_may_be_text_and_bytes(spark: SparkSession, columns: str, ansi: str) -> None:
    before = spark.conf.get("spark.sql.ansi.enabled")
    spark.conf.set("spark.sql.ansi.enabled", ansi)
    try:
        row, _ = division_of(spark.sql(f"select {columns}"), 1).of(spark.sql(f"select {columns}")).collect()
    finally:
        spark.conf.set("spark.sql.ansi.enabled", str(before))
    assert (row["key"], row["value"]) == (b"k", b"v")


@pytest.mark.thorough(but="64")
@pytest.mark.spark
@pytest.mark.parametrize("writers", [3, 64, 1000])
def test_each_writer_has_a_hash(spark: SparkSession, writers: int) -> None:
    hashes = hash_of_each_writer(spark, writers)
    rows = spark.createDataFrame([(each,) for each in hashes], "hash int")
    assert [row[0] for row in rows.select(F.expr(f"pmod(hash(hash), {writers})")).collect()] == list(range(writers))


@pytest.mark.spark
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("'k' key", "needs a column named value; the query has key"),
        ("1 value", "Column value is int, and Kafka takes binary or string"),
        ("'v' value, 1L partition", "Column partition is bigint, and Kafka takes int"),
    ],
)
def test_a_column_that_kafka_does_not_take_is_named(spark: SparkSession, columns: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        record_columns(spark.sql(f"select {columns}"))


@pytest.mark.thorough
@pytest.mark.spark
def test_a_stream_with_one_writer_finds_its_python_worker_again_beside_those_of_others(spark: SparkSession) -> None:
    def own_id(rows: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for _ in rows:
            pass
        yield pyarrow.RecordBatch.from_pydict({"id": [os.getpid()]})

    def workers(partitions: int) -> DataFrame:
        return spark.range(0, partitions, 1, partitions).mapInArrow(own_id, "id long")

    target, before = Transactions({}, "t", "p", 1, "d", "s", "q", Epoch(1, 1), "me"), spark.sparkContext.environment
    others = {row["id"] for row in workers(2).collect()}
    own = set()
    for _ in range(3):
        with _workers_of_their_own(spark, target):
            batch = workers(1)
        own |= {row["id"] for row in batch.collect()}

    assert len(own) == 1
    assert not own & others
    assert spark.sparkContext.environment is before


@pytest.mark.spark
def test_an_interruption_is_told_in_two_lines_in_which_spark_finds_it(spark: SparkSession) -> None:
    context = spark.sparkContext

    def cancel() -> None:
        deadline = time.monotonic() + 30
        while not context.statusTracker().getActiveJobsIds() and time.monotonic() < deadline:
            time.sleep(0.05)
        context.cancelJobGroup("batch")

    context.setJobGroup("batch", "", interruptOnCancel=True)
    canceller = Thread(target=cancel)
    canceller.start()
    with pytest.raises(RuntimeError) as caught, _interrupted_in_brief():
        context.range(2).map(lambda _: time.sleep(60)).count()
    canceller.join()
    told = str(caught.value)
    assert told.startswith("py4j.protocol.Py4JJavaError: An error occurred while calling ")
    assert "cancelled part of cancelled job group batch" in told
    assert len(told.splitlines()) == 2


@pytest.mark.spark
def test_an_error_that_is_no_interruption_stays_whole(spark: SparkSession) -> None:
    with pytest.raises((Py4JJavaError, PySparkException), match="the disk is full"), _interrupted_in_brief():
        spark.sparkContext.range(1).map(lambda _: {}["the disk is full"]).count()
