"""Sources with names (Spark 4.2 and later) need no mapping, and an unnamed stream is given names once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from dagster_ckpt.errors import SourceChangedError
from dagster_ckpt.recovery.compatibility_report import Compatibility
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry
from dagster_ckpt.spark.query.sources import source_options, sources_in_entry
from dagster_ckpt.spark.versions import NAMES_SOURCES, OFFSET_LOG_VERSION, Feature
from dagster_ckpt.stream.start_from import StartFrom
from tests.recovery.test_source_changes_with_spark import Release
from tests.support.needs import needs
from tests.support.small_spark import lay_file, small_spark

pytestmark = [pytest.mark.spark, needs(Feature.NAMED_SOURCES)]
NAMED = {NAMES_SOURCES: "true", OFFSET_LOG_VERSION: "2"}


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


class NamedRelease(Release):
    """A source whose folder is in upper case has its letter as a name."""

    def feed(self, *sources: str) -> None:
        super().feed(*(source.lower() for source in sources))

    def _read(self, source: str) -> DataFrame:
        if source.islower():
            return super()._read(source)
        files = self.spark.readStream.schema("value long, t timestamp").option("maxFilesPerTrigger", 1)
        return files.name(source.lower()).json(f"{self.folder}/{source.lower()}")

    def rows_of(self, **files: Sequence[int]) -> list[tuple[int, object]]:
        return [row for source, numbers in files.items() for number in numbers for row in self.laid[source][number]]


@pytest.fixture
def release(spark: SparkSession, tmp_path: Path) -> NamedRelease:
    return NamedRelease(spark, tmp_path, "counts")


@pytest.fixture(autouse=True)
def unnamed_afterwards(spark: SparkSession) -> Iterator[None]:
    yield
    for setting in NAMED:
        spark.conf.unset(setting)


def use_names(spark: SparkSession) -> None:
    for setting, value in NAMED.items():
        spark.conf.set(setting, value)


def test_names_need_no_mapping(spark: SparkSession, release: NamedRelease) -> None:
    use_names(spark)
    release.feed("a", "b", "c")
    release.run("AB")
    release.feed("a", "b", "c")

    assert release.check("CBA").verdict is Compatibility.COMPATIBLE
    release.run("CBA")

    assert release.result() == release.expected([release.rows_of(a=[0, 1], b=[0, 1], c=[0, 1])])


def test_each_source_is_known_by_its_name_in_whatever_order_spark_writes_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Spark's map of offsets keeps the order of four."""
    names = ["zeta", "delta", "kappa", "alpha", "omega", "gamma", "sigma"]
    use_names(spark)

    def read(name: str) -> DataFrame:
        (tmp_path / name).mkdir()
        lay_file(tmp_path / name, 0, [{"n": 1}])
        return spark.readStream.schema("n long").name(name).json(f"{tmp_path}/{name}")

    writer = reduce(DataFrame.union, map(read, names)).writeStream.format("noop").trigger(availableNow=True)
    writer.option("checkpointLocation", f"{tmp_path}/live").start().awaitTermination()
    read_to = parse_offset_entry((tmp_path / "live/offsets/0").read_bytes(), "offsets/0").sources

    found = [(name, source_options(leaf.node)["path"]) for leaf, name, _ in sources_in_entry(writer, read_to)]

    assert found == [(name, f"{tmp_path}/{name}") for name in names]
    assert list(read_to) != names


def test_a_name_that_is_gone_is_dropped_by_a_mapping(spark: SparkSession, release: NamedRelease) -> None:
    use_names(spark)
    release.feed("a", "b")
    release.run("AB")
    release.feed("a", "b")
    with pytest.raises(SourceChangedError, match="map_sources='b=b'"):
        release.run("B")

    release.run("B", start_from=StartFrom(map_sources="b=b"))

    assert release.result() == release.expected([release.rows_of(a=[0], b=[0, 1])])


def test_an_unnamed_stream_is_given_names_once(spark: SparkSession, release: NamedRelease) -> None:
    release.feed("a", "b", "c")
    release.run("ab")
    release.feed("a", "b", "c")
    use_names(spark)
    with pytest.raises(SourceChangedError, match="map_sources='a=0,b=1'"):
        release.run("AB")

    release.run("BA", start_from=StartFrom(map_sources="a=0,b=1"))
    release.feed("a", "b", "c")
    release.run("CBA")

    assert release.result() == release.expected([release.rows_of(a=[0, 1, 2], b=[0, 1, 2], c=[0, 1, 2])])
