"""Known defect 4: another grouping key of the same type is started by Spark without a word, and mixes the state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt.catalog.records import ExecutionStatus
from dagster_ckpt.client.preflight import preflight
from dagster_ckpt.errors import PlanChangedError
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import EndKind, Outcome, RunRequest
from dagster_ckpt.spark.query.description import QueryToStart
from dagster_ckpt.spark.query.plan import read_plan
from dagster_ckpt.spark.query.query import start_query
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.start_from import StartFrom
from tests.support import verbs
from tests.support.query_bench import make_stream
from tests.support.small_spark import lay_file, small_spark

pytestmark = pytest.mark.spark

Query = Callable[[DataFrame], DataFrame]
SITES = ("operator 2 (aggregation), key 2: site string -> device string",)


def counts(
    frame: DataFrame, *, key: str | Column = "site", delay: str = "10 minutes", more: tuple[Any, ...] = ()
) -> Any:
    return (
        frame.withWatermark("at", delay)
        .groupBy(F.window("at", "30 minutes"), key)
        .agg(F.count("*").alias("n"), *more)
        .drop("window")
    )


@dataclass
class Place:
    """A stream of a few files, all of them read whenever it runs."""

    spark: SparkSession
    root: Path
    stream: StreamHandle

    def feed(self, number: int) -> None:
        (self.root / "landing").mkdir(exist_ok=True)
        rows = [
            {"at": f"2024-01-01T{number:02}:{n:02}:00Z", "site": f"s{n % 2}", "device": f"d{n % 5}", "v": n}
            for n in range(10)
        ]
        lay_file(self.root / "landing", number, rows)

    def describe(self, query: Query) -> Callable[[], DataStreamWriter]:
        def described() -> DataStreamWriter:
            stream = self.spark.readStream.schema("at timestamp, site string, device string, v long")
            frame = query(stream.option("maxFilesPerTrigger", 1).json(str(self.root / "landing")))
            return frame.writeStream.format("noop").outputMode("append").trigger(availableNow=True)

        return described

    def run(self, query: Query, text: str = "latest", **how: Any) -> Outcome:
        to_start = QueryToStart(self.describe(query))
        return execute_stream(
            self.stream,
            RunRequest(
                run_id="run",
                start_query=lambda live: start_query(to_start.take(), "orders", live),
                describe=to_start.described,
                start_from=StartFrom(text, **how),
            ),
        )


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


@pytest.fixture(scope="module")
def place(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("plan")
    place = Place(spark, root, replace(make_stream(root), code_version="2"))
    for number in range(3):
        place.feed(number)
    assert place.run(counts).end.kind is EndKind.ENDED_BY_ITSELF
    verbs.trigger_savepoint(place.stream, origin="a test", label="good")
    yield place
    place.stream.catalog.close()


CHANGES = [
    pytest.param(lambda f: counts(f, key="device"), *SITES, id="key-renamed"),
    pytest.param(
        lambda f: counts(f, key=F.col("v")), "operator 2 (aggregation), key 2: site string -> v bigint", id="key-type"
    ),
    pytest.param(
        lambda f: counts(f.withColumn("site", F.col("device"))),
        "operator 2 (aggregation), computed column site: nothing -> device",
        id="another-column-under-the-name-of-the-key",
    ),
    pytest.param(
        lambda f: counts(f, more=(F.sum("v"),)),
        "operator 2 (aggregation), value 2: nothing -> sum(v) bigint",
        id="aggregate-added",
    ),
    pytest.param(
        lambda f: counts(f, delay="1 hour"),
        "operator 1 (watermark) delay: 10 minutes -> 1 hour",
        id="watermark-changed",
    ),
    pytest.param(
        lambda f: counts(f.dropDuplicates(["at"])),
        "operator 1, dropDuplicates by at, was added",
        id="operator-added",
    ),
    pytest.param(
        lambda f: f.select("site"), "operator 2, aggregation by window, site, was removed", id="operator-removed"
    ),
]


@pytest.mark.thorough(but="latest-*")
@pytest.mark.parametrize(("query", "said"), CHANGES)
@pytest.mark.parametrize("start_from", ["latest", "good"])
def test_a_start_with_another_plan_is_refused_before_anything_is_changed(
    place: Place, query: Query, said: str, start_from: str
) -> None:
    before = place.stream.catalog.streams.get("orders")

    with pytest.raises(PlanChangedError) as refused:
        place.run(query, start_from)

    assert said in str(refused.value)
    latest = place.stream.catalog.executions.latest("orders")
    assert latest is not None
    # Nothing restarts what is refused.
    assert (latest.status, latest.settled) == (ExecutionStatus.FAILED, True)
    after = place.stream.catalog.streams.get("orders")
    assert replace(after, updated_at_ms=0) == replace(before, updated_at_ms=0)


def test_a_preflight_says_what_is_different_and_what_spark_makes_of_it(place: Place) -> None:
    result = preflight(place.stream, place.describe(lambda f: counts(f, key="device")))

    assert not result.passed
    assert SITES[0] in result.reason
    assert "was replayed on a copy of the state" in result.reason, "Spark itself goes on with it"
    # The newest batch only moved the watermark.
    assert "the new code has the same state as the running code" in result.reason
    assert result.refused_plan is not None


def test_both_schemas_that_spark_prints_are_passed_on(place: Place) -> None:
    result = preflight(place.stream, place.describe(lambda f: counts(f, more=(F.sum("v"),))))

    assert not result.passed
    assert "the values of the state differ" in result.reason
    assert result.reason.count("StructField(count,LongType") == 2, result.reason
    assert "StructField(sum,LongType" in result.reason


@pytest.mark.thorough
def test_a_filter_another_column_and_another_sink_pass_without_question(place: Place) -> None:
    def harmless(frame: DataFrame) -> DataFrame:
        return counts(frame.where("v > 3").withColumn("unused", F.lit(1))).withColumn("shown", F.lit("x"))  # type: ignore[no-any-return]

    assert preflight(place.stream, place.describe(harmless)).passed
    place.feed(3)
    assert place.run(harmless).end.kind is EndKind.ENDED_BY_ITSELF


def test_a_change_that_is_meant_is_started_and_from_then_on_it_is_what_there_is(place: Place) -> None:
    def by_device(frame: DataFrame) -> DataFrame:
        return counts(frame, key="device")  # type: ignore[no-any-return]

    place.feed(4)
    verbs.set_desired_state(place.stream, None, origin="a test")
    assert preflight(place.stream, place.describe(by_device)).refused_plan is not None
    verbs.set_desired_state(place.stream, None, origin="a test", accept_plan_change=True)
    assert preflight(place.stream, place.describe(by_device)).passed, "exactly this plan was accepted"
    with pytest.raises(PlanChangedError):
        place.run(lambda f: counts(f, key=F.col("v")))

    assert place.run(by_device, accept_plan_change=True).end.kind is EndKind.ENDED_BY_ITSELF
    plan = read_plan(place.stream.catalog.streams.get("orders").plan)
    assert plan is not None
    assert ("device", "string") in plan.operators[1].keys
    assert place.run(by_device).end.kind is EndKind.ENDED_BY_ITSELF
    with pytest.raises(PlanChangedError, match="device string -> site string"):
        place.run(counts)
    # The savepoint from before is of the plan before.
    assert place.run(counts, "good").end.kind is EndKind.ENDED_BY_ITSELF
