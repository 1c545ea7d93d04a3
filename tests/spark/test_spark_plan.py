"""The fingerprint of a query's plan: the same wherever it runs, another where its state would be."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import spark_stateful_queries as queries
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from spark_scenarios import ROCKSDB, SCHEMA, Workload, run_to_the_end

from dagster_ckpt.recovery.operator_compatibility import Fate, evolve, plan_differences
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.operators import ExecutionMode, key_columns, read_operators
from dagster_ckpt.spark.query.plan import (
    PlanDescription,
    PlanOperator,
    describe_plan,
    plan_of_query,
    plan_of_writer,
    read_plan,
)
from dagster_ckpt.spark.query.query import QueryFacts, start_query
from dagster_ckpt.spark.versions import Feature, installed_release
from tests.support.needs import needs

pytestmark = [pytest.mark.spark, pytest.mark.core]

Query = Callable[[DataFrame, DataFrame], DataFrame]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("left", "right", "elsewhere"):
        (tmp_path / name).mkdir()
    return tmp_path


def stream(spark: SparkSession, folder: Path, delay: str = "20 seconds") -> DataFrame:
    return spark.readStream.schema(SCHEMA).json(str(folder)).withWatermark("t", delay)


def of(frame: DataFrame) -> str:
    return described(frame).fingerprint


def described(frame: DataFrame) -> PlanDescription:
    return describe_plan(frame._jdf.queryExecution().analyzed())


ALL = [
    queries.windowed_counts,
    queries.counts_for_ever,
    queries.one_total,
    queries.sessions,
    queries.first_of_each,
    queries.first_within_watermark,
    queries.inner_join,
    queries.left_outer_join,
    queries.pandas_with_state,
    pytest.param(queries.transform_rows, marks=needs(Feature.TRANSFORM_WITH_STATE)),
    pytest.param(queries.transform_pandas, marks=needs(Feature.TRANSFORM_WITH_STATE_IN_PANDAS)),
    queries.first_rows,
    queries.counts_over_a_join,
    queries.counts_of_firsts,
    queries.stateless_union,
]


def test_queries_with_another_state_have_another_fingerprint(spark: SparkSession, folder: Path) -> None:
    left, right = stream(spark, folder / "left"), stream(spark, folder / "right")
    builds: list[Query] = [build for build in ALL if callable(build)]
    if installed_release().has(Feature.TRANSFORM_WITH_STATE_IN_PANDAS):
        builds.append(queries.transform_pandas)

    assert len({of(build(left, right)) for build in builds}) == len(builds)


@pytest.mark.parametrize("build", ALL)
def test_it_is_the_same_in_another_session_and_for_another_path(
    spark: SparkSession, folder: Path, build: Query
) -> None:
    here = build(stream(spark, folder / "left"), stream(spark, folder / "right"))
    other = spark.newSession()
    there = build(stream(other, folder / "elsewhere"), stream(other, folder / "left"))

    assert of(here) == of(there)


def counted(frame: DataFrame, window: str = "30 seconds", key: str = "k", what: str = "v") -> DataFrame:
    return frame.groupBy(F.window("t", window), key).agg(F.sum(what).alias("total"))


@pytest.mark.parametrize(
    ("change", "same"),
    [
        pytest.param(lambda left: counted(left.where("v > 7")), True, id="a-filter"),
        pytest.param(lambda left: counted(left.select("t", "v", "k")), True, id="order-of-columns"),
        pytest.param(lambda left: counted(left).withColumn("more", F.lit(1)), True, id="a-column-for-the-sink"),
        pytest.param(lambda left: counted(left, window="1 minute"), False, id="window"),
        pytest.param(lambda left: counted(left, key="v"), False, id="key"),
        pytest.param(lambda left: counted(left, what="k"), False, id="aggregate"),
        pytest.param(lambda left: counted(left.withColumn("v", F.expr("v + 1"))), False, id="computed-column"),
        pytest.param(lambda left: counted(left.dropDuplicates(["k", "t"])), False, id="one-more-operator"),
        pytest.param(lambda left: counted(left.withColumn("k", F.col("k").cast("int"))), False, id="type-of-the-key"),
        pytest.param(lambda left: counted(left.withColumn("other", F.expr("v + 1"))), True, id="a-column-nobody-uses"),
        pytest.param(
            lambda left: counted(left.withColumn("v", F.col("k"))), False, id="another-column-under-the-same-name"
        ),
    ],
)
def test_it_changes_with_the_state_and_with_nothing_else(
    spark: SparkSession, folder: Path, change: Callable[[DataFrame], DataFrame], same: bool
) -> None:
    left = stream(spark, folder / "left")

    assert (of(change(left)) == of(counted(left))) is same


def test_it_changes_with_the_watermark_and_the_kind_of_a_join(spark: SparkSession, folder: Path) -> None:
    left, right, late = (
        stream(spark, folder / "left"),
        stream(spark, folder / "right"),
        stream(spark, folder / "left", "1 hour"),
    )

    assert of(counted(left)) != of(counted(late))
    assert of(queries._join(left, right, "inner")) != of(queries._join(left, right, "left_outer"))
    static = spark.createDataFrame([(1, 2)], "k long, w long")
    # A join with a table keeps no state.
    assert of(left.join(static, "k").select("k", "v")) == of(left.select("k", "v"))


def test_a_running_query_has_it_before_and_after_a_restart(spark: SparkSession, tmp_path: Path) -> None:
    work = Workload(queries.counts_over_a_join, ROCKSDB, tmp_path)
    live = LiveDirectory(f"{tmp_path}/live-0")
    run_to_the_end(spark, work, live, files_per_batch=8)

    facts = []
    for _ in range(2):
        writer = work.writer(work.session(spark))
        planned = plan_of_writer(writer)
        query = start_query(writer, "restarted", live)
        while query.facts().plan is None:
            assert not query.wait(0.01)
        facts.append(query.facts())
        query.stop()

    assert facts[0] == facts[1]
    columns = tuple((field.name, field.dataType.simpleString()) for field in writer._df.schema)
    assert facts[0] == QueryFacts(ExecutionMode.MICRO_BATCH, planned, spark.version, columns)


def values(frame: DataFrame) -> list[str]:
    plan = plan_of_writer(frame.writeStream)
    assert plan is not None
    return [text for text, _ in plan.operators[-1].values]


def test_aggregates_are_those_that_spark_keeps_in_its_order(spark: SparkSession, folder: Path) -> None:
    """Two of one type would else continue as each other, and nothing would say so."""
    counted = (
        stream(spark, folder / "left")
        .groupBy("k")
        .agg(F.sum("k").alias("a"), F.max("v").alias("b"), F.sum("k").alias("c"), F.count("*").alias("d"))
    )

    assert values(counted) == ["sum(k)", "max(v)", "count(1)"]
    assert values(counted.select("d", "b", "k", "a")) == ["count(1)", "max(v)", "sum(k)"]
    assert values(counted.select((F.col("b") + F.col("a")).alias("x"), "d")) == ["max(v)", "sum(k)", "count(1)"]
    assert values(counted.select("k", "b").where("b > 3")) == ["max(v)"]
    assert values(counted.select("k")) == []
    assert values(counted.drop("d").withColumn("e", F.col("c") + 1)) == ["sum(k)", "max(v)"]


class Frames:
    """Two streams with columns of the same names, and a table."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        schema = "k long, v long, o long, t timestamp"
        self.spark = spark
        self.f, self.g = (spark.readStream.schema(schema).json(str(folder / name)) for name in ("left", "right"))
        self.s = spark.createDataFrame([(1, 2, 3)], "k long, v long, o long")

    def sums(self, *lines: tuple[str, str]) -> DataFrame:
        frame = self.f
        for name, text in lines:
            frame = frame.withColumn(name, F.expr(text))
        return frame.groupBy("k").agg(F.sum("v"), F.sum("o"))

    def joined(self, on: str, where: str = "true") -> DataFrame:
        return self.f.alias("l").join(self.g.alias("r"), F.expr(on)).where(where)

    def steps(self, first: str, second: str) -> DataFrame:
        made = self.f.withColumn("v", F.expr(first)).withColumn("o", F.expr(second)).select("o", "v", "k")
        return made.union(self.g.select(F.col("k").alias("o"), "v", "k"))

    def viewed(self, column: str) -> DataFrame:
        self.f.join(self.g.select("k", F.col("v").alias("w")), "k").createOrReplaceTempView("joined")
        return self.spark.sql(f"SELECT k, {column} AS x, w FROM joined")


Change = tuple[Callable[[Frames], DataFrame], Callable[[Frames], DataFrame]]
OTHER_STATE: dict[str, Change] = {
    "order of withColumn": (
        lambda x: x.sums(("o", "v * 2"), ("v", "v + 1000")),
        lambda x: x.sums(("v", "v + 1000"), ("o", "v * 2")),
    ),
    "a column of a table": (
        lambda x: x.f.join(x.s, x.f.k == x.s.k).groupBy(x.f.o).agg(F.sum(x.f.v)),
        lambda x: x.f.join(x.s, x.f.k == x.s.k).groupBy(x.f.o).agg(F.sum(x.s.v)),
    ),
    "a union by name": (
        lambda x: x.f.select("k", "o").union(x.g.select("o", "k")).groupBy("k").count(),
        lambda x: x.f.select("k", "o").unionByName(x.g.select("o", "k")).groupBy("k").count(),
    ),
    "nulls ignored": (
        lambda x: x.f.groupBy("k").agg(F.first("v")),
        lambda x: x.f.groupBy("k").agg(F.first("v", ignorenulls=True)),
    ),
    "sides of a condition": (
        lambda x: x.f.join(x.g, x.f.k == x.g.o).select(x.f.k, x.g.v),
        lambda x: x.f.join(x.g, x.g.k == x.f.o).select(x.f.k, x.g.v),
    ),
    "order in a condition": (
        lambda x: x.joined("l.k = r.k AND l.t >= r.t").select("l.k"),
        lambda x: x.joined("l.k = r.k AND r.t >= l.t").select("l.k"),
    ),
    "what a join keeps for a filter": (
        lambda x: x.joined("l.k = r.k", "l.v >= 0").select("l.k", "l.o", "r.v"),
        lambda x: x.joined("l.k = r.k", "l.o >= 0").select("l.k", "l.v", "r.v"),
    ),
    "what a join keeps for a view": (lambda x: x.viewed("v"), lambda x: x.viewed("o")),
    "the branch of dropDuplicates": (
        lambda x: x.f.dropDuplicates(["k"]).select("k").union(x.g.select("k")),
        lambda x: x.f.select("k").union(x.g.dropDuplicates(["k"]).select("k")),
    ),
    "a column of a union that another is made of": (
        lambda x: x.steps("v + 1", "v * 2").groupBy("k").agg(F.sum("v"), F.sum("o")),
        lambda x: x.steps("v * 2", "v + 1").groupBy("k").agg(F.sum("v"), F.sum("o")),
    ),
    "many steps": (
        lambda x: x.sums(*[("v", "v + o"), ("o", "o + v")] * 20),
        lambda x: x.sums(*[("v", "v + o"), ("o", "o + v")] * 20, ("v", "v + 1")),
    ),
    "subtract": (
        lambda x: x.f.select("k", "o").subtract(x.s.select("k", "o")),
        lambda x: x.f.select("k", "v").subtract(x.s.select("k", "v")),
    ),
}
SAME_STATE: dict[str, Change] = {
    "a filter": (lambda x: x.sums(), lambda x: Frames.sums(filtered(x))),
    "a filter on a join": (
        lambda x: x.joined("l.k = r.k").select("l.k", "l.v", "r.o"),
        lambda x: x.joined("l.k = r.k", "l.v > 3").select("l.k", "l.v", "r.o"),
    ),
    "an unused column": (lambda x: x.sums(), lambda x: x.sums(("w", "v * 2"))),
    "a lookup of a table": (
        lambda x: x.f.groupBy("o").agg(F.sum("v")),
        lambda x: x.f.join(x.s.select("k"), "k").groupBy("o").agg(F.sum("v")),
    ),
}


def filtered(frames: Frames) -> Frames:
    frames.f = frames.f.where("v > 3 AND k <> 7")
    return frames


def fingerprints(spark: SparkSession, folder: Path, change: Change) -> list[str]:
    plans = [plan_of_writer(build(Frames(spark, folder)).writeStream) for build in change]
    return [plan.fingerprint for plan in plans if plan is not None]


@pytest.mark.parametrize("change", OTHER_STATE.values(), ids=OTHER_STATE)
def test_what_is_named_alike_but_is_other_state_has_another_fingerprint(
    spark: SparkSession, folder: Path, change: Change
) -> None:
    """Each was a start that went through, and whose results were wrong."""
    before, after = fingerprints(spark, folder, change)
    assert before != after
    assert fingerprints(spark, folder, (change[0], change[0])) == [before] * 2


@pytest.mark.parametrize("change", SAME_STATE.values(), ids=SAME_STATE)
def test_what_keeps_the_same_state_has_the_same_fingerprint(spark: SparkSession, folder: Path, change: Change) -> None:
    before, after = fingerprints(spark, folder, change)
    assert before == after


def test_branches_are_numbered_as_spark_numbers_them(spark: SparkSession, folder: Path, tmp_path: Path) -> None:
    def side(name: str, key: str) -> DataFrame:
        counts = stream(spark, folder / name).groupBy(F.window("t", "30 seconds"), key).count()
        return counts.select("window", F.col(key).cast("string").alias("key"), "count")

    for name in ("left", "right"):
        (folder / name / "1.json").write_text('{"t": "2024-01-01T00:00:00", "k": 1, "v": 2}')
    plan = plan_of_writer(side("left", "k").union(side("right", "v")).writeStream)
    assert plan is not None
    assert plan.numbers == (None, 0, None, 1)
    assert "numbers" in plan.as_record()
    assert read_plan(plan.as_record()) == plan
    assert read_plan({**plan.as_record(), "revision": 1}) != plan
    assert plan.fingerprint == replace(plan, numbers=None).fingerprint
    linear = plan_of_writer(side("left", "k").writeStream)
    assert linear is not None
    assert (linear.numbers, "numbers" in linear.as_record()) == (None, False)

    rows = side("left", "k").union(side("right", "v"))
    query = rows.writeStream.option("checkpointLocation", str(tmp_path / "live")).format("noop").trigger(once=True)
    query.start().awaitTermination()
    operators = read_operators(LiveDirectory(str(tmp_path / "live")).folder, 0)
    assert [[each["name"] for each in key_columns(operator.files[-1])][-1] for operator in operators] == ["k", "v"]


def test_over_spark_connect_there_is_none(spark: SparkSession) -> None:
    class Connect:
        """A query or a writer of Spark Connect: its plan is in another process."""

    assert plan_of_query(Connect()) is None  # type: ignore[arg-type]
    assert plan_of_writer(Connect()) is None  # type: ignore[arg-type]


def test_where_a_day_begins_is_part_of_the_state(spark: SparkSession, folder: Path) -> None:
    def plan(zone: str, *keys: Column | str) -> PlanDescription:
        spark.conf.set("spark.sql.session.timeZone", zone)
        found = plan_of_writer(stream(spark, folder / "left").groupBy(*keys).count().writeStream)
        assert found is not None
        return found

    before = spark.conf.get("spark.sql.session.timeZone")
    try:
        for key in (
            F.to_date("t"),
            F.hour("t"),
            F.date_trunc("day", "t"),
            F.date_format("t", "yyyy"),
            F.col("t").cast("string"),
        ):
            utc, berlin = plan("Etc/UTC", key), plan("Europe/Berlin", key)
            (said,) = plan_differences(utc, berlin)
            assert said == "operator 2 (aggregation) spark.sql.session.timeZone: UTC -> Europe/Berlin"
            assert plan("UTC", key) == utc
            assert [each.fate for each in evolve(utc, berlin)] == [Fate.KEEP, Fate.REFUSE]
            # What an earlier version recorded does not tell it.
            assert plan_differences(utc.as_described_by(2), berlin) == ()
            spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
        for keys in (
            (F.window("t", "1 day"),),
            ("k", F.to_date(F.lit("2024-01-01").cast("date"))),
            (F.col("k").cast("string"),),
        ):
            assert plan("UTC", *keys).fingerprint == plan("Europe/Berlin", *keys).fingerprint
    finally:
        spark.conf.set("spark.sql.session.timeZone", before or "UTC")


def test_a_random_seed_is_no_change(spark: SparkSession, folder: Path) -> None:
    left = stream(spark, folder / "left")

    def salted() -> DataFrame:
        return left.withColumn("salt", F.floor(F.rand() * 8)).groupBy("salt").count()

    assert described(salted()) == described(salted())


T = PlanOperator("EventTimeWatermark", keys=(("t", "timestamp"),), settings=(("delay", "20 seconds"),))
WINDOW = ("window", "struct<start:timestamp,end:timestamp>")


@pytest.mark.parametrize(
    ("build", "operators"),
    [
        pytest.param(
            lambda left, _: left.groupBy(F.window("t", "1 minute", "30 seconds"), "k").agg(F.sum("v") / F.count("*")),
            (
                T,
                PlanOperator(
                    "Aggregate",
                    (WINDOW, ("k", "bigint")),
                    (("sum(v)", "bigint"), ("count(1)", "bigint")),
                    definitions=(("window", "window(t, size 60 s, slide 30 s, start 0 s)"),),
                ),
            ),
            id="a-sliding-window-and-what-a-quotient-is-made-of",
        ),
        pytest.param(
            queries.first_of_each,
            (
                T,
                PlanOperator("Deduplicate", (("seen", "bigint"),), definitions=(("seen", "(v % CAST(53 AS BIGINT))"),)),
            ),
            id="a-computed-key",
        ),
        pytest.param(
            lambda left, right: (
                left.selectExpr("k", "v + 1 AS price", "t")
                .alias("l")
                .join(right.alias("r"), F.expr("l.k = r.k AND l.t = r.t"))
                .select("price")
            ),
            (
                T,
                T,
                PlanOperator(
                    "Join",
                    values=(
                        *(("left.k", "bigint"), ("left.price", "bigint"), ("left.t", "timestamp")),
                        *(("right.k", "bigint"), ("right.t", "timestamp")),
                    ),
                    settings=(("type", "Inner"), ("condition", "((l.k = r.k) AND (l.t = r.t))")),
                    definitions=(("price", "(v + CAST(1 AS BIGINT))"),),
                ),
            ),
            id="a-join-keeps-what-is-used-of-both-sides",
        ),
        pytest.param(
            queries.pandas_with_state,
            (
                T,
                PlanOperator(
                    "FlatMapGroupsInPandasWithState",
                    (("k", "bigint"),),
                    settings=(("stateType", "struct<n:bigint,total:bigint>"), ("timeout", "NoTimeout")),
                ),
            ),
            id="a-state-of-the-function's-own",
        ),
        pytest.param(queries.stateless_union, (), id="a-watermark-alone-keeps-nothing"),
    ],
)
def test_what_is_said_of_operators(
    spark: SparkSession, folder: Path, build: Query, operators: tuple[PlanOperator, ...]
) -> None:
    left, right = stream(spark, folder / "left"), stream(spark, folder / "right")

    assert described(build(left, right)).as_described_by(1).operators == operators


def test_between_reads_as_the_two_comparisons_that_spark_3_5_makes_of_it(spark: SparkSession, folder: Path) -> None:
    left, right = stream(spark, folder / "left").alias("l"), stream(spark, folder / "right").alias("r")
    later = "r.t + INTERVAL 20 SECONDS"

    one = of(left.join(right, F.expr(f"l.k = r.k AND l.t BETWEEN r.t AND {later}")))

    assert one == of(left.join(right, F.expr(f"l.k = r.k AND (l.t >= r.t AND l.t <= {later})")))
    assert one != of(left.join(right, F.expr(f"l.k = r.k AND (l.t > r.t AND l.t <= {later})")))
