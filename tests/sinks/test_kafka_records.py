"""What the transactional Kafka sink makes of the columns of a batch; no broker is asked."""

from __future__ import annotations

import importlib
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Thread

import pyarrow
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from dagster_ckpt.errors import OptionError, StorageAccessError
from dagster_ckpt.sinks.kafka import share
from dagster_ckpt.sinks.kafka.marker import Epoch, Marker, Transactions
from dagster_ckpt.sinks.kafka.session import Record
from dagster_ckpt.sinks.kafka.writer import _interrupted_in_brief, divided, record_columns, rows_by_share
from tests.support.small_spark import small_spark

HEADERS = pyarrow.list_(pyarrow.struct([("key", pyarrow.string()), ("value", pyarrow.binary())]))
EVERY_COLUMN = (
    "'k' key, 'v' value, array(struct('h' key, cast('x' as binary) value)) headers, 'other' topic, 2 partition"
)


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


def test_a_column_that_a_query_lacks_is_sent_as_none() -> None:
    batches = [
        pyarrow.RecordBatch.from_pydict({"value": [b"a", None]}),
        pyarrow.RecordBatch.from_pydict({"value": [b"b"]}),
    ]
    assert list(share._records(batches)) == [Record(b"a"), Record(None), Record(b"b")]


def test_each_column_of_a_row_goes_into_its_record() -> None:
    columns = {
        "partition": pyarrow.array([2, None], pyarrow.int32()),
        "headers": pyarrow.array([[{"key": "h", "value": b"x"}, {"key": "h", "value": None}], None], HEADERS),
        "key": pyarrow.array([b"k", None]),
        "topic": pyarrow.array(["other", None]),
        "value": pyarrow.array([b"v", b"w"]),
    }
    assert list(share._records([pyarrow.RecordBatch.from_pydict(columns)])) == [
        Record(b"v", b"k", [("h", b"x"), ("h", None)], "other", 2),
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

    def commit(self, batch: int) -> None:
        self.ended.append(f"committed {batch}")
        self.last = batch

    def abandon(self) -> None:
        self.ended.append("aborted")

    def close(self) -> None: ...


@pytest.mark.parametrize(("arrived", "ended"), [(3, "committed 5"), (2, "aborted"), (0, "aborted")])
def test_a_share_whose_rows_end_early_is_not_committed(
    arrived: int, ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Share()
    monkeypatch.setattr(share, "Session", lambda *_: session)
    monkeypatch.setattr(share, "marker_at_a_glance", lambda *_: session.marker())
    monkeypatch.setattr(share, "sessions", {})
    target = Transactions({}, "t", "p", 1, "d", "s", "q", Epoch(1, 1), "me")

    with nullcontext() if arrived == 3 else pytest.raises(StorageAccessError, match=f"received {arrived} of the 3"):
        share.write_share(target, 0, 5, [Record(b"a")] * arrived, 3)

    assert session.ended == [ended]


def test_a_worker_forgets_the_archives_of_spark_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyspark.zip", "py4j-0.10.9.9-src.zip", "jobs.zip"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(f"module_of_{name.split('-')[0].split('.')[0]}.py", "")
        monkeypatch.syspath_prepend(str(tmp_path / name))
    assert importlib.import_module("module_of_jobs")

    share._forget_archives_of_spark()

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
        (EVERY_COLUMN, ["key", "value", "headers", "topic", "partition"]),
    ],
)
@pytest.mark.parametrize("writers", [1, 2])
def test_the_columns_that_kafka_takes_are_selected(
    spark: SparkSession, columns: str, taken: list[str], writers: int
) -> None:
    batch = spark.sql(f"select {columns}")
    records = divided(batch.select(record_columns(batch)), writers)
    assert records.columns == taken
    assert records.rdd.getNumPartitions() == writers
    (row,) = records.collect()
    assert row["value"] == b"v"


@pytest.mark.spark
@pytest.mark.parametrize("writers", [1, 3])
def test_the_rows_of_each_share_are_counted(spark: SparkSession, writers: int) -> None:
    shares = divided(spark.range(50).selectExpr("cast(id as string) value"), writers).persist()
    sizes = shares.rdd.glom().map(len).collect()
    assert rows_by_share(shares) == {writer: size for writer, size in enumerate(sizes) if size}
    assert sum(sizes) == 50
    assert rows_by_share(shares.where("false")) == {}
    shares.unpersist()


@pytest.mark.spark
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("'k' key", "needs a column named value; the query has key"),
        ("1 value", "Column value is int, and Kafka takes binary or string"),
        ("'v' value, 1 topic", "Column topic is int, and Kafka takes string"),
        ("'v' value, 1L partition", "Column partition is bigint, and Kafka takes int"),
    ],
)
def test_a_column_that_kafka_does_not_take_is_named(spark: SparkSession, columns: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        record_columns(spark.sql(f"select {columns}"))


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
