"""The matrix of `source_changes.yaml` on real Spark: changed sources, and the rows of a batch computation."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import Client, run_stream
from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.errors import CkptError, PlanChangedError, SourceChangedError
from dagster_ckpt.recovery.compatibility_report import Compatibility
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.testing import assert_compatible
from tests.support.log_lines import collecting
from tests.support.small_spark import lay_file, lose, small_spark

pytestmark = pytest.mark.spark
CASES = yaml.safe_load(Path(__file__).with_name("source_changes.yaml").read_text())
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
RATE = "rate"
Row = tuple[int, datetime]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


class Release:
    """A query over several sources whose code changes."""

    def __init__(self, spark: SparkSession, folder: Path, operator: str = "rows") -> None:
        self.spark, self.folder, self.operator = spark, folder, operator
        self.laid: dict[str, list[list[Row]]] = {}
        self.batches: list[tuple[int, list[Any]]] = []
        self.breaks_at: int | None = None
        self.places = {
            "catalog": f"sqlite:///{folder}/catalog.db",
            "storage": f"file://{folder}/snapshots",
            "live_root": f"{folder}/live",
        }

    def feed(self, *sources: str) -> None:
        for source in sources:
            if source == RATE:
                continue
            files = self.laid.setdefault(source, [])
            number = len(files)
            at = NOON + timedelta(seconds=20 * number + ord(source) % 7)
            rows = [(10 * number + value + 3 * (ord(source) % 7), at) for value in range(2)]
            files.append(rows)
            (self.folder / source).mkdir(exist_ok=True)
            lay_file(self.folder / source, number, [{"value": v, "t": t.isoformat()} for v, t in rows])

    def writer(self, sources: Sequence[str], left: int = 0) -> DataStreamWriter:
        frames = [self._read(source) for source in sources]
        shaped = shape(self.operator, [union(frames[:left]), union(frames[left:])] if left else [union(frames)])
        if self.operator == "rows":
            return shaped.writeStream.format("parquet").option("path", f"{self.folder}/out").trigger(availableNow=True)
        mode = "append" if self.operator in ("distinct", "join") else "update"
        return shaped.writeStream.outputMode(mode).foreachBatch(self._keep).trigger(availableNow=True)

    def run(self, sources: Sequence[str], left: int = 0, **options: Any) -> list[str]:
        messages: list[str] = []
        with collecting(messages):
            run_stream("orders", lambda _: self.writer(sources, left), **self.places, spark=self.spark, **options)
        return messages

    def check(self, sources: Sequence[str], left: int = 0, start: StartFrom | str = "latest") -> Any:
        with Client(**self.places) as client:
            return client.check("orders", lambda: self.writer(sources, left), start_from=start)

    def _read(self, source: str) -> DataFrame:
        reader = self.spark.readStream
        if source == RATE:
            rate = reader.format("rate-micro-batch").options(rowsPerBatch=2, numPartitions=1, startTimestamp=NOON_MS)
            frame = rate.load().select("value", F.col("timestamp").alias("t"))
        else:
            files = reader.schema("value long, t timestamp").option("maxFilesPerTrigger", 1)
            frame = files.json(f"{self.folder}/{source}")
        return frame.withWatermark("t", "1 hour") if self.operator == "watermarks" else frame

    def _keep(self, frame: DataFrame, batch: int) -> None:
        rows = [tuple(row) for row in frame.collect()]
        if self.breaks_at == batch:
            raise ValueError("the function breaks")
        self.batches.append((batch, rows))

    def result(self) -> Counter[Any]:
        if self.operator == "rows":
            return Counter(map(tuple, self.spark.read.parquet(f"{self.folder}/out").collect()))
        rows = [row for _, rows in self.batches for row in rows]
        return Counter(rows if self.operator in ("distinct", "join") else {row[:-1]: row for row in rows}.values())

    def expected(self, sides: Sequence[Sequence[Row]]) -> Counter[Any]:
        frames = [self.spark.createDataFrame(list(side), "value long, t timestamp") for side in sides]
        return Counter(map(tuple, shape(self.operator, frames).collect()))


NOON_MS = int(NOON.timestamp() * 1_000)


def union(frames: Sequence[DataFrame]) -> DataFrame:
    found = frames[0]
    for frame in frames[1:]:
        found = found.union(frame)
    return found


def shape(operator: str, sides: Sequence[DataFrame]) -> DataFrame:
    frame, key = sides[0], (F.col("value") % 3).alias("key")
    match operator:
        case "counts":
            return frame.groupBy(key).count()
        case "windows":
            timed = frame.withWatermark("t", "1 hour") if frame.isStreaming else frame
            return timed.groupBy(F.window("t", "30 seconds"), key).count().select("window.start", "key", "count")
        case "watermarks":
            return frame.groupBy(F.window("t", "30 seconds"), key).count().select("window.start", "key", "count")
        case "distinct":
            return frame.select((F.col("value") % 11).alias("key")).dropDuplicates(["key"])
        case "join":
            left, right = (side.select(key, F.col("value")) for side in sides)
            return left.join(right.withColumnRenamed("value", "other"), "key")
        case _:
            return frame


def rate_rows(runs: int) -> list[Row]:
    return [(value, NOON + timedelta(seconds=value // 2)) for value in range(2 * runs)]


def consumed(release: Release, case: dict[str, Any]) -> list[list[Row]]:
    """What each side of the query must have read, by the mapping."""
    before, after, mapping = case["before"], case["after"], dict(pair.split("=") for pair in case["map"].split(","))
    sides: list[list[Row]] = [[], []]
    lefts = case.get("left", [0, 0])

    def files(source: str, first: int, end: int) -> list[Row]:
        return list(itertools.chain.from_iterable(release.laid[source][first:end]))

    for at, source in enumerate(before):
        side = sides[1 if lefts[0] and at >= lefts[0] else 0]
        runs = 3 if str(at) in mapping.values() else 1
        side += rate_rows(runs) if source == RATE else files(source, 0, 4 if runs == 3 else 2)
    for at, source in enumerate(after):
        begins = mapping[str(at)]
        if begins.startswith("new"):
            side = sides[1 if lefts[1] and at >= lefts[1] else 0]
            side += rate_rows(2) if source == RATE else files(source, 3 if begins == "new:latest" else 0, 4)
    return sides if lefts[0] else sides[:1]


@pytest.mark.thorough(but="reorder below an aggregation")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_sources_change(spark: SparkSession, tmp_path: Path, case: dict[str, Any]) -> None:
    release = Release(spark, tmp_path, case["operator"])
    before, after = case["before"], case["after"]
    left, new_left = case.get("left", [0, 0])
    everything = sorted({*before, *after})
    start = StartFrom(map_sources=case["map"], accept_plan_change=case.get("accept_plan_change", False))
    release.feed(*everything)
    release.feed(*everything)
    release.run(before, left)
    release.feed(*everything)

    # The verdict on a plain start, and the start itself.
    plain = release.check(after, new_left)
    is_moved = case.get("refused") == "on side right"
    assert plain.verdict is Compatibility(case.get("verdict", "MIGRATABLE")), plain.messages()
    assert plain.options["map_sources"] == case["proposed"]
    with pytest.raises(AssertionError, match=plain.verdict.value), Client(**release.places) as client:
        assert_compatible("orders", client=client, query=lambda: release.writer(after, new_left))
    with pytest.raises((SourceChangedError, PlanChangedError), match="nothing was changed") as refused:
        release.run(after, new_left)
    assert case["proposed"] in str(refused.value) or is_moved

    asked = release.check(after, new_left, start)
    if "refused" in case:
        assert asked.verdict is Compatibility.INCOMPATIBLE
        assert case["refused"] in asked.reason
        with pytest.raises(CkptError, match=case["refused"]):
            release.run(after, new_left, start_from=start)
        release.run(before, left)
        ran = {
            **case,
            "after": before,
            "map": ",".join(f"{at}={at}" for at in range(len(before))),
            "left": [left, left],
        }
        sides = consumed(release, ran)
        kept = [source for source in before if source != RATE]
        assert all(len(release.laid[source]) == 3 for source in kept)
        assert release.result() == release.expected(sides)
        return
    assert asked.verdict is Compatibility.MIGRATABLE, asked.messages()
    messages = release.run(after, new_left, start_from=start)
    release.feed(*everything)
    release.run(after, new_left)

    assert release.result() == release.expected(consumed(release, case))
    assert [batch for batch, _ in release.batches] == sorted({batch for batch, _ in release.batches})
    told = " ".join(messages)
    assert all("is new and reads from" in told for word in case["map"].split(",") if "new" in word)
    assert release.check(after, new_left).verdict is Compatibility.SAME


def test_the_batch_in_flight_is_planned_again_for_the_new_sources(spark: SparkSession, tmp_path: Path) -> None:
    """Its rows are read again exactly by the sources that continue."""
    release = Release(spark, tmp_path, "counts")
    release.feed("a", "b")
    release.run("a")
    release.feed("a", "b")
    release.breaks_at = 1
    with pytest.raises(Exception, match="the function breaks"):
        release.run("a")
    release.breaks_at = None
    live = next((tmp_path / "live/orders").glob("live-1-*"))
    assert (live / "offsets/1").exists()
    assert not (live / "commits/1").exists()

    release.run("ba", start_from=StartFrom(map_sources="0=new,1=0"))

    everything = [row for source in "ab" for file in release.laid[source] for row in file]
    assert release.result() == release.expected([everything])


@pytest.mark.thorough
def test_a_file_sink_that_has_the_batch_in_flight_goes_back(spark: SparkSession, tmp_path: Path) -> None:
    release = Release(spark, tmp_path)
    release.feed("a", "b")
    release.run("a")
    release.feed("a", "b")
    release.run("a")
    live = next((tmp_path / "live/orders").glob("live-1-*"))
    for commit in ("commits/1", "commits/.1.crc"):
        (live / commit).unlink(missing_ok=True)
    with Catalog(release.places["catalog"]).database.writing() as connection:
        connection.exec_driver_sql("UPDATE executions SET progress = json_set(progress, '$.batch_id', 0)")

    messages = release.run("ba", start_from=StartFrom(map_sources="0=new,1=0"))

    assert any(f"rolled back the sink file:{tmp_path}/out" in each for each in messages), messages
    everything = [row for source in "ab" for file in release.laid[source] for row in file]
    assert release.result() == release.expected([everything])


def test_a_repeated_start_does_not_read_a_new_source_again(spark: SparkSession, tmp_path: Path) -> None:
    release = Release(spark, tmp_path)
    release.feed("a", "b")
    release.run("a")
    release.feed("a", "b")
    start = StartFrom(map_sources="0=0,1=new")
    for _ in range(3):
        release.run("ab", start_from=start)
        release.feed("a", "b")

    assert release.result() == release.expected([[row for s in "ab" for file in release.laid[s][:4] for row in file]])


@pytest.mark.thorough
def test_the_former_code_returns_with_the_savepoint_that_the_change_took(spark: SparkSession, tmp_path: Path) -> None:
    release = Release(spark, tmp_path)
    release.feed("a", "b")
    release.run("a")
    messages = release.run("ab", start_from=StartFrom(map_sources="0=0,1=new"))
    label = next(re.search("took the savepoint (before-rewind-[0-9]+)", each) for each in messages if "took" in each)
    assert label is not None
    with pytest.raises(SourceChangedError):
        release.run("a")
    release.feed("a")

    release.run("a", start_from=label[1])

    assert release.result() == release.expected([[row for file in release.laid["a"] for row in file]])


@pytest.mark.thorough
def test_a_snapshot_from_before_the_change_is_mapped_as_well(spark: SparkSession, tmp_path: Path) -> None:
    release = Release(spark, tmp_path, "rows")
    release.feed("a", "b")
    release.run("a")
    with Client(**release.places) as client:
        client.trigger_savepoint("orders", label="of-a")
    lose(tmp_path / "live")
    release.feed("a", "b")

    release.run("ba", start_from=StartFrom("of-a", map_sources="0=new,1=0"))

    assert release.result() == release.expected([[row for s in "ab" for file in release.laid[s] for row in file]])
    assert release.check("ba").verdict is Compatibility.SAME


def test_older_rows_of_a_new_source_are_late_and_the_preview_says_so(spark: SparkSession, tmp_path: Path) -> None:
    release = Release(spark, tmp_path, "windows")
    release.feed("a")
    release.run("a")
    # The watermark is an hour behind.
    start = StartFrom(map_sources="0=0,1=new")
    with Client(**release.places) as client:
        told = client.preview_rewind("orders", start_from=start).messages()
    assert any("the watermark stays at 2026-01-01 11:00" in each for each in told), told
    (tmp_path / "b").mkdir()
    lay_file(tmp_path / "b", 0, [{"value": 1, "t": (NOON - timedelta(hours=2)).isoformat()}])

    release.run("ab", start_from=start)

    assert release.result() == release.expected([[row for file in release.laid["a"] for row in file]])
