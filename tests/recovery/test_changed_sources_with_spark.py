"""A release whose query reads other sources: refused before anything changes, and the advice of the refusal helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import Client, run_stream
from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.errors import OptionError, SourceChangedError
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry
from dagster_ckpt.spark.query.sources import source_options, sources_in_entry
from dagster_ckpt.spark.query.trial_batch import sources_to_read
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.log_lines import collecting
from tests.support.small_spark import lay_file, small_spark

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


class Letters:
    """Collects the rows of a union of folders; each row is there once, whatever the batches."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.rows: list[int] = []
        self.places = {
            "catalog": f"sqlite:///{folder}/catalog.db",
            "storage": f"file://{folder}/snapshots",
            "live_root": f"{folder}/live",
        }

    def feed(self, folder: str, number: int, value: int) -> None:
        (self.folder / folder).mkdir(exist_ok=True)
        lay_file(self.folder / folder, number, [{"value": value}])

    def run(self, *paths: str, **options: Any) -> list[str]:
        def query(spark: SparkSession) -> DataStreamWriter:
            frames = [self._read(spark, path) for path in paths]
            frame = frames[0]
            for other in frames[1:]:
                frame = frame.union(other)
            return frame.writeStream.foreachBatch(self._keep).trigger(availableNow=True)

        messages: list[str] = []
        with collecting(messages):
            run_stream("letters", query, **self.places, spark=self.spark, **options)
        return messages

    def _read(self, spark: SparkSession, path: str) -> DataFrame:
        place = path if path.startswith(("/", "file:")) else f"{self.folder}/{path}"
        return spark.readStream.schema("value long").option("maxFilesPerTrigger", 1).json(place)

    def _keep(self, frame: DataFrame, _batch: int) -> None:
        self.rows += [row["value"] for row in frame.collect()]

    def forget_what_was_recorded(self) -> None:
        """As if an earlier version of the package had run the stream."""
        with Catalog(self.places["catalog"]).database.writing() as connection:
            connection.exec_driver_sql("UPDATE executions SET recovery = json_remove(recovery, '$.source_identities')")


@pytest.fixture
def letters(spark: SparkSession, tmp_path: Path) -> Letters:
    return Letters(spark, tmp_path)


@pytest.mark.thorough(but=("move it back-True", "a link-False"))
@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("remedy", ["move it back", "a link"])
def test_a_folder_that_was_moved(letters: Letters, remedy: str, is_recorded: bool) -> None:
    for number in range(2):
        letters.feed("in", number, number)
        letters.run("in")
    (letters.folder / "in").rename(letters.folder / "moved")
    letters.feed("moved", 2, 2)
    if not is_recorded:
        letters.forget_what_was_recorded()

    for _ in range(3):
        with pytest.raises(SourceChangedError, match="nothing was changed") as refused:
            letters.run("moved")

    assert f"is file file:{letters.folder}/moved" in str(refused.value)
    assert f"{letters.folder}/in" in str(refused.value)
    if remedy == "a link":
        (letters.folder / "in").symlink_to(letters.folder / "moved")
    else:
        (letters.folder / "moved").rename(letters.folder / "in")
    letters.run("in")
    assert sorted(letters.rows) == [0, 1, 2]


def test_a_pattern_of_another_folder_would_read_everything_again(letters: Letters) -> None:
    letters.feed("in", 0, 0)
    letters.run("in/*.json")
    (letters.folder / "in").rename(letters.folder / "in_new")

    with pytest.raises(SourceChangedError, match="read again"):
        letters.run("in_new/*.json")

    assert letters.rows == [0]


@pytest.mark.thorough(but="now[03]-*")
@pytest.mark.parametrize(
    ("now", "is_recorded"),
    [
        (("b", "a"), True),
        (("b", "a"), False),
        (("a", "b", "c"), True),
        (("a", "b", "c"), False),
        # Two equal offsets may be those of one source that is read twice.
        (("a",), True),
    ],
)
def test_sources_in_another_order_or_number(letters: Letters, now: Sequence[str], is_recorded: bool) -> None:
    for value, name in enumerate("abc"):
        letters.feed(name, 0, value)
    letters.run("a", "b")
    if not is_recorded:
        letters.forget_what_was_recorded()

    with pytest.raises(SourceChangedError, match="- source"):
        letters.run(*now)

    letters.feed("b", 1, 8)
    letters.run("a", "b")
    assert sorted(letters.rows) == [0, 1, 8]


@pytest.mark.thorough(but=("<lambda>0", "<lambda>3"))
@pytest.mark.parametrize(
    "spelling",
    [
        lambda folder: f"file:{folder}/in",
        lambda folder: f"file://{folder}/in/",
        lambda folder: f"{folder}/./other/../in",
        lambda folder: f"{folder}/*n",
        lambda folder: f"{folder}/i{{n,x}}/",
    ],
)
def test_another_spelling_of_a_path_reads_on(letters: Letters, spelling: Callable[[Path], str]) -> None:
    letters.feed("in", 0, 0)
    letters.run("in")
    letters.feed("in", 1, 1)

    letters.run(spelling(letters.folder))

    assert letters.rows == [0, 1]


def test_other_sources_begin_empty_as_the_refusal_says(letters: Letters) -> None:
    letters.feed("in", 0, 0)
    letters.feed("other", 0, 7)
    letters.run("in")
    with pytest.raises(SourceChangedError, match="start_from=empty with discard_state"):
        letters.run("other")

    letters.run("other", start_from=StartFrom("empty", discard_state=True))

    assert letters.rows == [0, 7]


@pytest.mark.thorough
def test_a_restore_compares_with_the_sources_of_its_snapshot(letters: Letters) -> None:
    letters.feed("in", 0, 0)
    letters.run("in")
    with Client(**letters.places) as client:
        client.trigger_savepoint("letters", label="of-in")
    letters.feed("other", 0, 7)
    letters.run("other", start_from=StartFrom("empty", discard_state=True))

    with pytest.raises(SourceChangedError, match="savepoint"):
        letters.run("other", start_from="of-in")

    letters.feed("in", 1, 1)
    letters.run("in", start_from="of-in")
    assert sorted(letters.rows) == [0, 1, 7]


def test_a_folder_that_is_read_twice_through_one_frame_is_refused(letters: Letters) -> None:
    """Spark gives both uses one log, so the second would look lost at each checkpoint."""
    letters.feed("in", 0, 0)

    def twice(spark: SparkSession) -> DataStreamWriter:
        frame = letters._read(spark, "in")
        return frame.union(frame).writeStream.foreachBatch(letters._keep).trigger(availableNow=True)

    with pytest.raises(OptionError, match=r"in twice through one DataFrame.*Call spark.readStream once for each use"):
        run_stream("letters", twice, **letters.places, spark=letters.spark)

    assert letters.rows == []
    letters.run("in", "in")
    letters.feed("in", 1, 1)
    letters.run("in", "in")
    assert sorted(letters.rows) == [0, 0, 1, 1]


def numbers(spark: SparkSession, rows: int) -> DataFrame:
    return spark.readStream.format("rate-micro-batch").options(rowsPerBatch=rows, numPartitions=1).load()


def test_a_folder_is_not_read_behind_another_source_that_is_read_twice(letters: Letters) -> None:
    """Its offset is the third one, and its log the second."""
    letters.feed("in", 0, 0)

    def twice(spark: SparkSession) -> DataStreamWriter:
        frame = numbers(spark, 1).select("value")
        rows = frame.union(frame).union(letters._read(spark, "in").selectExpr("CAST(1 AS BIGINT)"))
        return rows.writeStream.foreachBatch(letters._keep).trigger(availableNow=True)

    with pytest.raises(OptionError, match=r"reads rate-micro-batch twice through one DataFrame"):
        run_stream("letters", twice, **letters.places, spark=letters.spark)


def test_sources_that_are_read_twice_are_not_mapped(letters: Letters) -> None:
    def run(*sources: int, **options: Any) -> None:
        def writer(spark: SparkSession) -> DataStreamWriter:
            frame = numbers(spark, 1).select("value")
            frames = [frame if each == 1 else numbers(spark, each).select("value") for each in sources]
            rows = reduce(DataFrame.union, frames)
            return rows.writeStream.foreachBatch(lambda *_: None).trigger(once=True)

        run_stream("letters", writer, **letters.places, spark=letters.spark, **options)

    run(1)
    with pytest.raises(OptionError, match=r"Call spark\.readStream once for each use"):
        run(1, 1, 5, start_from=StartFrom(map_sources="0=0,1=new"))
    run(1, 5, start_from=StartFrom(map_sources="0=0,1=new"))


def test_a_source_behind_one_that_is_read_twice_has_its_own_offset(spark: SparkSession, tmp_path: Path) -> None:
    frame = numbers(spark, 1)
    writer = frame.union(frame).union(numbers(spark, 5)).writeStream.format("noop").trigger(once=True)
    writer.option("checkpointLocation", str(tmp_path / "live")).start().awaitTermination()
    read_to = parse_offset_entry((tmp_path / "live/offsets/0").read_bytes(), "offsets/0").sources

    found = [
        (source_options(leaf.node)["rowsperbatch"], name, leaf.log)
        for leaf, name, _ in sources_in_entry(writer, read_to)
    ]

    assert found == [("1", "0", "0"), ("1", "1", "0"), ("5", "2", "1")]
    assert read_to["0"] == read_to["1"] != read_to["2"]
    assert [(each.key, each.name) for each in sources_to_read(writer)] == [("0", "0"), ("1", "2")]
