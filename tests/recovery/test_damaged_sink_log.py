"""A damaged log of a file sink is written back from the newest snapshot that has it, without a person."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dagster_ckpt import RestartStrategies
from dagster_ckpt.errors import RowsAtRiskError, SharedSinkError
from dagster_ckpt.spark.doctor.finding import Severity
from tests.recovery.test_field_cases import SETTINGS
from tests.support.file_damage import cut, drop, flip, zero
from tests.support.small_spark import lose, small_spark
from tests.support.small_stream import STREAM, SmallStream, copies, dedup, distinct, without_checksums

pytestmark = pytest.mark.spark

RESTARTED = RestartStrategies.fixed_delay_restart(5, 1)


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark(SETTINGS) as session:
        yield session


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> SmallStream:
    """It has a savepoint after batch 2, and has run on to batch 6."""
    made = SmallStream(spark, tmp_path / "stream")
    made.feed(3)
    made.run()
    made.savepoint()
    made.feed(4)
    made.run()
    return made


def log_of(stream: SmallStream, output: str = "out") -> Path:
    return stream.root / output / "_spark_metadata"


def newest(log: Path) -> Path:
    return max(log.glob("[0-9]*"), key=lambda path: int(path.name.split(".")[0]))


def newest_compact(log: Path) -> Path:
    return max(log.glob("*.compact"), key=lambda path: int(path.name.split(".")[0]))


def comes_back(stream: SmallStream) -> None:
    stream.feed(2)
    stream.run(restart_strategy=RESTARTED)
    assert stream.rows() == copies(stream.files)
    with stream.client() as client:
        assert client.doctor(STREAM).diagnosis.worst is not Severity.ERROR


DAMAGES: dict[str, Callable[[Path], object]] = {
    "compact dropped": lambda log: drop(newest_compact(log)),
    "compact flipped": lambda log: flip(newest_compact(log)),
    "newest flipped": lambda log: flip(newest(log)),
    "newest cut": lambda log: cut(newest(log)),
    "newest zeroed": lambda log: zero(newest(log)),
    "newest dropped": lambda log: drop(newest(log)),
    "all gone": lose,
}


@pytest.mark.thorough(but="live is lost-all gone")
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("loses_live", [False, True], ids=["live is good", "live is lost"])
def test_it_comes_back(stream: SmallStream, damage: str, loses_live: bool) -> None:
    DAMAGES[damage](log_of(stream))
    if "flipped" not in damage:
        without_checksums(stream.root / "out")
    if loses_live:
        lose(stream.live)

    comes_back(stream)


@pytest.mark.thorough
def test_a_query_with_state_comes_back_too(spark: SparkSession, tmp_path: Path) -> None:
    stream = SmallStream(spark, tmp_path / "stream", dedup)
    stream.feed(3)
    stream.run()
    stream.savepoint()
    stream.feed(4)
    stream.run()
    drop(newest_compact(log_of(stream)))

    stream.feed(1)
    stream.run(restart_strategy=RESTARTED)

    assert stream.rows() == distinct(stream.files)


def test_rows_whose_files_are_gone_are_not_listed(stream: SmallStream) -> None:
    """The log would be whole again, and every reader would fail on it."""
    listed = sorted((stream.root / "out").glob("part-*"), key=lambda path: path.stat().st_mtime_ns)
    away = stream.root / listed[0].name
    listed[0].rename(away)
    shutil.rmtree(log_of(stream))
    stream.feed(1)

    refused = stream.refused(restart_strategy=RESTARTED)

    assert isinstance(refused, RowsAtRiskError)
    assert listed[0].name in str(refused)
    away.rename(listed[0])
    stream.run()
    assert stream.rows() == copies(stream.files)


def test_a_damaged_log_of_another_query_is_not_written_over(stream: SmallStream, tmp_path: Path) -> None:
    """The output of another query was put in its place."""
    other = SmallStream(stream.spark, tmp_path / "other")
    other.feed(9)
    other.run_plainly("plain")
    (stream.root / "out").rename(stream.root / "kept")
    shutil.copytree(other.root / "out", stream.root / "out")
    drop(newest_compact(log_of(stream)))
    stream.feed(1)

    assert isinstance(stream.refused(restart_strategy=RESTARTED), SharedSinkError)


def test_a_damaged_entry_enters_no_snapshot(stream: SmallStream) -> None:
    """A restore would write it back without the checksum that shows the damage."""
    flip(newest(log_of(stream)))

    with stream.client() as client:
        with pytest.raises(Exception, match="checksum"):
            client.trigger_savepoint(STREAM, label="damaged")
        assert [each for each in client.list_snapshots(STREAM) if each.label == "damaged"] == []
