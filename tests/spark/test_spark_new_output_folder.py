"""A query that goes on in a new folder: the log it is given there lives through its next two compactions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dagster_ckpt.sinks.file_sink_log import begin_log, logged_batch
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.query import start_query
from tests.support.small_spark import lay_file, small_spark

pytestmark = pytest.mark.spark
INTERVAL = "spark.sql.streaming.fileSink.log.compactInterval"


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark({"spark.sql.shuffle.partitions": "1"}) as session:
        yield session


def run(spark: SparkSession, root: Path, folder: str) -> None:
    rows = spark.readStream.schema("k long").option("maxFilesPerTrigger", 1).json(str(root / "in"))
    writer = rows.writeStream.format("json").option("path", str(root / folder)).trigger(availableNow=True)
    query = start_query(writer, "moved", LiveDirectory(str(root / "live")))
    while not query.wait(0.5):
        pass
    assert query.exception() is None, query.exception()


@pytest.mark.thorough(but="4-4")
@pytest.mark.parametrize(("moved_after", "interval"), [(0, 4), (2, 10), (4, 4), (9, 3), (12, 10)])
def test_a_new_folder_is_read_and_written_across_two_compactions(
    spark: SparkSession, tmp_path: Path, moved_after: int, interval: int
) -> None:
    spark.conf.set(INTERVAL, str(interval))
    (tmp_path / "in").mkdir()
    for number in range(moved_after + 1):
        lay_file(tmp_path / "in", number, [{"k": number}])
    run(spark, tmp_path, "before")
    begin_log(str(tmp_path / "new"), moved_after)
    # Read at once, and again by sessions with other settings after compactions.
    last = moved_after + 1
    for wanted in (moved_after + 1, moved_after + 24):
        for number in range(last, wanted + 1):
            lay_file(tmp_path / "in", number, [{"k": number}])
        last = wanted + 1
        spark.conf.set(INTERVAL, str(interval))
        run(spark, tmp_path, "new")
        # Until its first compaction, a log that begins at batch 0 is read with the interval of the reader, as always.
        for readers in (2, 7, 10) if moved_after else (interval, 10):
            spark.conf.set(INTERVAL, str(readers))
            shown = sorted(row.k for row in spark.read.schema("k long").json(str(tmp_path / "new")).collect())
            assert shown == list(range(moved_after + 1, last)), readers

    log = {path.name for path in (tmp_path / "new/_spark_metadata").iterdir()}
    assert len([name for name in log if name.endswith(".compact") and not name.startswith(".")]) >= 2
    assert logged_batch(str(tmp_path / "new")) == last - 1
    assert sorted(row.k for row in spark.read.json(str(tmp_path / "before")).collect()) == list(range(moved_after + 1))


def test_without_a_log_the_next_compaction_fails_for_good(spark: SparkSession, tmp_path: Path) -> None:
    spark.conf.set(INTERVAL, "10")
    (tmp_path / "in").mkdir()
    for number in range(3):
        lay_file(tmp_path / "in", number, [{"k": number}])
    run(spark, tmp_path, "before")
    for number in range(3, 11):
        lay_file(tmp_path / "in", number, [{"k": number}])

    with pytest.raises(AssertionError, match=r"BATCH_METADATA_NOT_FOUND|doesn't exist|not found"):
        run(spark, tmp_path, "new")
