"""Troubles that people report in public: each ends with equal rows, or is refused before anything has changed.

A refusal names what it is about, and following its advice ends with equal rows.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dagster_ckpt import RestartStrategies
from dagster_ckpt.errors import CkptError, PlanChangedError, RowsAtRiskError, SharedSinkError
from dagster_ckpt.spark.doctor.finding import Severity
from dagster_ckpt.spark.versions import TableFormat
from tests.support.file_damage import drop
from tests.support.shop_tables import play
from tests.support.small_spark import lay_file, lose, small_spark
from tests.support.small_stream import STREAM, SmallStream, Writer, copies, dedup, distinct, without_checksums
from tests.support.table_jars import fetch_jars, needs_jar

pytestmark = pytest.mark.spark

SETTINGS = {
    "spark.sql.streaming.fileSink.log.compactInterval": "4",
    "spark.sql.streaming.fileSource.log.compactInterval": "4",
}
RESTARTED = RestartStrategies.fixed_delay_restart(5, 1)
Made = Callable[..., SmallStream]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark(SETTINGS) as session:
        yield session


@pytest.fixture
def made(spark: SparkSession, tmp_path: Path) -> Made:
    def make(query: Callable[[DataFrame], DataFrame] = lambda rows: rows) -> SmallStream:
        return SmallStream(spark, tmp_path / "stream", query)

    return make


def lived(stream: SmallStream, *, before: int = 3, after: int = 2) -> SmallStream:
    """It has a savepoint, and has run on."""
    stream.feed(before)
    stream.run()
    stream.savepoint()
    stream.feed(after)
    stream.run()
    return stream


def comes_back(stream: SmallStream, rows: Callable[[int], Counter[Any]]) -> None:
    """The next start brings every row once, without a person."""
    stream.feed(1)
    stream.run(restart_strategy=RESTARTED)
    assert stream.rows() == rows(stream.files)


def worst(stream: SmallStream) -> Severity | None:
    with stream.client() as client:
        return client.doctor(STREAM).diagnosis.worst


def names(error: CkptError, *words: str) -> None:
    """A refusal says what it is about."""
    assert not [word for word in words if word not in str(error)], error


# Files of the live directory that somebody or something deleted


def test_01_a_lost_query_id_is_the_old_one_again(made: Made) -> None:
    """Under another id an exactly-once sink writes batches twice."""
    stream = lived(made())
    drop(stream.live / "metadata")

    assert worst(stream) is Severity.ERROR
    comes_back(stream, copies)


def test_01_a_plain_directory_without_its_query_id_is_not_adopted(made: Made) -> None:
    stream = made()
    stream.feed(3)
    stream.run_plainly("plain")
    drop(stream.root / "plain/metadata")
    before = stream.files_of("plain", "out")

    with stream.client() as client, pytest.raises(CkptError, match="metadata"):
        client.adopt(STREAM, checkpoint_location=f"{stream.root}/plain", sinks=[f"{stream.root}/out"])

    assert stream.files_of("plain", "out") == before


def empty_state(directory: Path) -> None:
    shutil.rmtree(directory / "state")
    (directory / "state").mkdir()


def test_02_an_emptied_folder_of_state_is_damage(made: Made) -> None:
    stream = lived(made(dedup))
    empty_state(stream.live)

    assert worst(stream) is Severity.ERROR
    comes_back(stream, distinct)


def test_02_a_plain_directory_whose_state_is_gone_is_not_adopted(made: Made) -> None:
    """It would count as one without state, and its query would be fenced."""
    stream = made(dedup)
    stream.feed(3)
    stream.run_plainly("plain")
    empty_state(stream.root / "plain")
    without_checksums(stream.root / "plain")
    before = stream.files_of("plain", "out")

    with stream.client() as client:
        with pytest.raises(CkptError, match="state"):
            client.adopt(STREAM, checkpoint_location=f"{stream.root}/plain", sinks=[f"{stream.root}/out"])
        assert [each for each in client.list_streams() if each.stream_id == STREAM] == [] or not client.list_snapshots(
            STREAM
        )
    assert stream.files_of("plain", "out") == before


@pytest.mark.thorough
@pytest.mark.parametrize(("query", "rows"), [(lambda rows: rows, copies), (dedup, distinct)], ids=["plain", "state"])
def test_04_a_hole_in_the_offset_log_is_damage(made: Made, query: Any, rows: Any) -> None:
    stream = lived(made(query))
    offsets = stream.live / "offsets"
    newest = max(int(path.name) for path in offsets.iterdir() if path.name.isdecimal())
    shutil.copy(offsets / str(newest), offsets / str(newest + 2))
    without_checksums(offsets)

    assert worst(stream) is Severity.ERROR
    comes_back(stream, rows)


def delete_old_logs(live: Path) -> None:
    for log in ("offsets", "commits"):
        for path in (live / log).iterdir():
            if path.name.isdecimal() and int(path.name) < 5:
                drop(path)


def delete_compacted_source_log(live: Path) -> None:
    for path in (live / "sources/0").glob("*.compact"):
        drop(path)


@pytest.mark.thorough
@pytest.mark.parametrize("rule", [delete_old_logs, delete_compacted_source_log])
def test_32_a_lifecycle_rule_on_the_live_directory(made: Made, rule: Callable[[Path], None]) -> None:
    stream = lived(made(), after=4)
    rule(stream.live)

    comes_back(stream, copies)


@pytest.mark.thorough
def test_32_a_lifecycle_rule_on_the_log_of_the_sink(made: Made) -> None:
    """Spark reads the newest compacted log, and every later entry."""
    stream = lived(made(), after=4)
    log = stream.root / "out/_spark_metadata"
    kept = {path: path.read_bytes() for path in log.glob("*.compact")}
    for path in kept:
        drop(path)

    assert worst(stream) is Severity.ERROR
    stream.feed(1)
    before = stream.files_of("out")
    try:
        stream.run(restart_strategy=RESTARTED)
    except CkptError as error:
        names(error, str(stream.root / "out"))
        assert stream.files_of("out") == before
        for path, data in kept.items():
            path.write_bytes(data)
        stream.run()
    assert stream.rows() == copies(stream.files)


# Sinks


def test_06_another_output_under_the_same_checkpoint_stays_readable_or_is_refused(made: Made) -> None:
    """Its log would begin past batch 0: neither readers nor the next compaction accept that."""
    stream = lived(made())
    stream.feed(9)
    other = stream.writer(output="out2")
    before, live = stream.files_of("live", "out", "snapshots"), stream.live
    try:
        stream.run(other)
    except CkptError as error:
        names(error, str(stream.root / "out2"))
        assert (stream.files_of("live", "out", "snapshots"), stream.live) == (before, live)
        stream.run()
        assert stream.rows() == copies(stream.files)
    else:
        assert stream.rows("out", "out2") == copies(stream.files)


@pytest.mark.thorough
def test_07_a_new_checkpoint_for_an_old_output_is_refused(made: Made) -> None:
    """Spark would skip the batches whose numbers the log of the sink has."""
    stream = made()
    stream.feed(4)
    stream.run_plainly("plain")
    before = stream.files_of("out")

    with pytest.raises(SharedSinkError) as refused:
        stream.run()

    names(refused.value, str(stream.root / "out"))
    assert stream.files_of("out") == before
    stream.run(stream.writer(output="out2"))
    assert stream.rows("out2") == copies(4)


def moved_output(stream: SmallStream) -> None:
    """A plain query, whose output was moved with its log: that names the old place."""
    stream.feed(3)
    stream.run_plainly("plain", stream.writer(output="old"))
    (stream.root / "old").rename(stream.root / "out")
    without_checksums(stream.root)


@pytest.mark.thorough
@pytest.mark.parametrize("way_on", ["moved back", "relocated"])
def test_14_an_output_that_was_moved_is_not_adopted_as_it_is(made: Made, way_on: str) -> None:
    """Readers look for its files at the old place, and miss them without a word."""
    stream = made()
    moved_output(stream)
    before = stream.files_of("plain", "out")

    with stream.client() as client, pytest.raises(CkptError) as refused:
        client.adopt(STREAM, checkpoint_location=f"{stream.root}/plain", sinks=[f"{stream.root}/out"])

    names(refused.value, str(stream.root / "old"))
    assert stream.files_of("plain", "out") == before
    output = "out" if way_on == "relocated" else "old"
    with stream.client() as client:
        if way_on == "relocated":
            client.relocate_output(f"{stream.root}/out")
        else:
            (stream.root / "out").rename(stream.root / "old")
        client.adopt(STREAM, checkpoint_location=f"{stream.root}/plain", sinks=[f"{stream.root}/{output}"])
    stream.feed(2)
    stream.run(stream.writer(output=output))
    assert stream.rows(output) == copies(5)


# Changes of the code


def test_10_other_keys_of_deduplication_are_refused_and_the_old_code_goes_on(made: Made) -> None:
    def keyed(*keys: str) -> Writer:
        def writer(spark: SparkSession) -> Any:
            rows = stream.read(spark, schema="a long, b long").dropDuplicates([*keys])
            return stream.write(rows.select("a"))

        return writer

    stream = made()
    stream.feed(3)
    stream.run(keyed("a"))
    stream.savepoint()
    stream.feed(1)

    refused = stream.refused(keyed("a", "b"))

    assert isinstance(refused, PlanChangedError)
    names(refused, "b")
    stream.run(keyed("a"))
    assert stream.rows() == distinct(4)


def test_13_state_keeps_its_partitions_whatever_the_session_says(made: Made, spark: SparkSession) -> None:
    stream = made(dedup)
    stream.feed(3)
    stream.run()
    stream.feed(1)
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "5")
    try:
        stream.run()
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before)

    assert sum(path.name.isdecimal() for path in (stream.live / "state/0").iterdir()) == 2
    assert stream.rows() == distinct(4)


# Sources


@pytest.mark.thorough(but="folder")
@pytest.mark.parametrize("pattern", ["", "/*.json"], ids=["folder", "pattern"])
def test_12_inputs_that_were_moved_are_another_source(made: Made, pattern: str) -> None:
    """Of a folder Spark says a few raw words; by another pattern everything would be read again."""
    stream = made()
    old, new = (stream.writer(folder=f"{folder}{pattern}") for folder in ("in", "in_new"))
    stream.feed(3)
    stream.run(old)
    stream.savepoint()
    (stream.root / "in").rename(stream.root / "in_new")

    refused = stream.refused(new)

    assert type(refused).__name__ == "SourceChangedError"
    names(refused, f"{stream.root}/in{pattern}", f"{stream.root}/in_new{pattern}")
    (stream.root / "in_new").rename(stream.root / "in")
    stream.feed(1)
    stream.run(old)
    assert stream.rows() == copies(4)


@pytest.mark.thorough(but="a restart")
@pytest.mark.parametrize("how", ["a restart", "a person's start", "the savepoint"])
def test_12_a_wrong_folder_in_a_release_costs_nothing(made: Made, how: str) -> None:
    """Three starts with wrong code; then the right code continues where the stream stood."""
    stream = lived(made())
    (stream.root / "other").mkdir()
    lay_file(stream.root / "other", 90, [{"a": 1}])
    live = stream.live

    for _ in range(3):
        names(stream.refused(stream.writer(folder="other"), restart_strategy=RESTARTED), f"{stream.root}/other")

    stream.feed(1)
    if how == "a person's start":
        with stream.client() as client:
            client.request_start(STREAM, start_from="latest")
    stream.run(start_from="sp" if how == "the savepoint" else "latest")
    assert stream.rows() == copies(stream.files)
    assert (stream.live == live) == (how != "the savepoint")


def test_12_rows_of_a_wrong_folder_do_not_reach_a_sink_that_takes_each_batch_again(made: Made) -> None:
    stream = made()

    def writer(folder: str) -> Writer:
        def save(rows: DataFrame, _: int) -> None:
            with (stream.root / "rows").open("a") as file:
                file.writelines(f"{row.a}\n" for row in rows.collect())

        return lambda spark: stream.read(spark, folder).writeStream.foreachBatch(save)

    stream.feed(5)
    stream.run(writer("in"))
    (stream.root / "other").mkdir()
    lay_file(stream.root / "other", 90, [{"a": 1}])
    (stream.root / "out").mkdir()
    for _ in range(3):
        stream.refused(writer("other"))
    stream.feed(1)
    stream.run(writer("in"))

    assert Counter((int(line),) for line in (stream.root / "rows").read_text().split()) == copies(6)


def expire(stream: SmallStream, *numbers: int) -> Callable[[], None]:
    """Move input files away. Returns what moves them back, with their times: Spark ages files by them."""
    away = stream.root / "away"
    away.mkdir()
    files = [f"{number:04}.json" for number in numbers]
    for name in files:
        (stream.root / "in" / name).rename(away / name)

    def back() -> None:
        for name in files:
            (away / name).rename(stream.root / "in" / name)

    return back


@pytest.mark.thorough
def test_20_a_rewind_over_inputs_that_expired_is_refused(made: Made) -> None:
    """The sink would be rolled back, and its rows could not be written again."""
    stream = lived(made(), after=3)
    back = expire(stream, 0, 1, 2, 3, 4)

    with stream.client() as client:
        forecast = "\n".join(str(sink) for sink in client.preview_rewind(STREAM, start_from="sp").sinks)
    assert "EXACT" not in forecast
    refused = stream.refused(start_from="sp")

    assert isinstance(refused, RowsAtRiskError)
    names(refused, "0003.json", "0004.json")
    assert "0000.json" not in str(refused), "files that were read before the savepoint are not needed"
    back()
    stream.run(start_from="sp")
    assert stream.rows() == copies(6)


def test_20_a_replay_over_inputs_that_expired_is_refused(made: Made) -> None:
    """State would lack the rows of those files, and let their duplicates through."""
    stream = lived(made(dedup))
    lose(stream.live)
    back = expire(stream, 4)
    stream.feed(1)
    before = stream.files_of("out", "snapshots")

    with pytest.raises(RowsAtRiskError, match=r"0004\.json"):
        stream.run(restart_strategy=RESTARTED)

    assert stream.files_of("out", "snapshots") == before
    back()
    stream.run(restart_strategy=RESTARTED)
    assert stream.rows() == distinct(6)


@pytest.mark.thorough
def test_20_a_replay_takes_only_the_files_of_its_batches(made: Made) -> None:
    stream = made(dedup)

    def all_files(spark: SparkSession) -> Any:
        return stream.write(dedup(stream.read(spark, files=100)))

    stream.feed(2)
    stream.run(all_files)
    stream.savepoint()
    for _ in range(3):
        stream.feed(1)
        stream.run(all_files)
    lose(stream.live)
    stream.feed(3)
    stream.run(all_files)

    assert stream.rows() == distinct(8)


@pytest.mark.thorough
@needs_jar(TableFormat.DELTA)
def test_11_a_source_table_that_was_made_again_is_refused_and_none_that_stands_beside_one_that_is_read_twice(
    tmp_path: Path,
) -> None:
    fetch_jars(TableFormat.DELTA, tmp_path / "jars")

    played = play("tests.recovery.recreated_source_program", tmp_path, tmp_path / "jars")

    assert played.pop("read twice") == {"scenario": "read twice", "is_equal": True, "is_debugged": True}
    assert len(played) == 2
    for told in played.values():
        assert told["refused"] is not None, told
        assert "table" in told["refused"], told
        assert (told["is_changed"], told["is_equal"]) == (False, True), told


# Event time


@pytest.mark.thorough
def test_15_an_event_far_in_the_future_is_reported_and_can_be_undone(made: Made) -> None:
    """Every later event is late, and nothing fails."""
    stream = made()

    def windows(until: str) -> Writer:
        def writer(spark: SparkSession) -> Any:
            rows = stream.read(spark, schema="at timestamp").where(F.col("at") < until)
            counts = rows.withWatermark("at", "10 minutes").groupBy(F.window("at", "1 hour")).count()
            return stream.write(counts.selectExpr("unix_seconds(window.start) AS start", "count"))

        return writer

    def feed(year: int, number: int) -> None:
        stream.feed(0)
        times = [f"{year}-01-01T{number:02}:{minute:02}:00Z" for minute in range(10)]
        lay_file(stream.root / "in", number, [{"at": at} for at in times])

    for number in range(3):
        feed(2026, number)
    stream.run(windows("9999-01-01"))
    stream.savepoint()
    feed(2099, 3)
    stream.run(windows("9999-01-01"))
    feed(2026, 4)
    stream.run(windows("9999-01-01"))

    with stream.client() as client:
        found = [finding.explanation for finding in client.doctor(STREAM).diagnosis.findings]
        health = str(client.health(STREAM))
    assert [explanation for explanation in found if "2099" in explanation]
    assert "2099" in health
    feed(2026, 6)
    stream.run(windows("2030-01-01"), start_from="sp")
    hours = Counter({(1_767_225_600 + 3600 * number, 10): 1 for number in (0, 1, 2, 4)})
    assert stream.rows() == hours
