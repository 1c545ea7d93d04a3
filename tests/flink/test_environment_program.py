"""Programs on a StreamExecutionEnvironment: each setting's effect, seen on the query that runs with it."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from counting_program import Program, execute_until
from pyspark.sql import DataFrame, SparkSession

from dagster_ckpt.catalog.records import ExecutionStatus, SnapshotTrigger, StartCause
from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.errors import OptionError, OptionTypeError, StatePartitionsError, StreamFailedError
from dagster_ckpt.flink import environment
from dagster_ckpt.flink.environment import StreamExecutionEnvironment
from dagster_ckpt.flink.execution_config import KRYO_TYPES, SERIALIZER, KryoRegistrations
from dagster_ckpt.policies.restart import RestartStrategies
from dagster_ckpt.runtime.run_request import EndKind
from dagster_ckpt.spark.query.description import same_session
from dagster_ckpt.spark.query.session import application_settings
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup, SnapshotKind, TimeCharacteristic
from tests.support.small_spark import start_jvm

pytestmark = pytest.mark.spark

ORIGIN = "a test"
REGISTERED = "java.util.concurrent.atomic.AtomicLong"
SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"
KRYO = "org.apache.spark.serializer.KryoSerializer"


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session that an environment has started by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        start_jvm()
        env = StreamExecutionEnvironment.get_execution_environment(folder=tmp_path_factory.mktemp("program"))
        env.set_default_local_parallelism(2)
        env.register_type(REGISTERED)
        env.spark.sparkContext.setLogLevel("OFF")
        yield env.spark
        env.spark.stop()


@pytest.fixture
def program(spark: SparkSession, tmp_path: Path) -> Program:
    return Program(spark, tmp_path)


@pytest.fixture(scope="module")
def seen(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a running query shows of every setting that was made."""
    program = Program(spark, tmp_path_factory.mktemp("seen"))
    program.feed(3)
    before = spark.conf.get(SHUFFLE_PARTITIONS)
    env = program.environment()
    env.set_parallelism(2).set_max_parallelism(3).set_buffer_timeout(200).disable_operator_chaining()
    env.set_state_backend(EmbeddedRocksDBStateBackend(False)).enable_changelog_state_backend(True)
    env.set_default_savepoint_directory(str(program.folder / "savepoints")).enable_checkpointing(300)
    env.add_writer("counts", program.writer(env))
    facts: dict[str, Any] = {"before": before}

    def looked() -> bool:
        if program.checkpoints() == 0:
            return False
        newest = program.catalog.snapshots.newest_checkpoint("counts")
        if "conf" not in facts:
            facts.update(_look(spark))
            facts["savepoint"] = env.client().trigger_savepoint("counts").location
            facts["newest"] = newest
            # What comes now is not in any snapshot yet.
            program.feed(1)
        return newest is not None and newest != facts["newest"]

    execute_until(env, looked, "shops")
    return facts | {"offsets": program.offsets(), "after": spark.conf.get(SHUFFLE_PARTITIONS), "program": program}


def _look(spark: SparkSession) -> dict[str, Any]:
    (query,) = spark.streams.active
    execution: Any = query._jsq.streamingQuery()
    conf = execution.lastExecution().sparkSession().conf()
    settings = conf.getAll()
    plan = execution.lastExecution().executedPlan().toString()
    return {
        "name": query.name,
        "trigger": str(execution.trigger().toString()),
        "conf": {key: settings.apply(key) for key in _SETTINGS if settings.contains(key)},
        "plan": str(plan),
    }


_SETTINGS = (
    SHUFFLE_PARTITIONS,
    "spark.sql.leafNodeDefaultParallelism",
    "spark.sql.codegen.wholeStage",
    "spark.sql.streaming.stateStore.providerClass",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled",
)


@pytest.mark.core
def test_a_program_counts_like_a_batch_query(program: Program) -> None:
    program.feed(4)
    env = program.environment()
    env.add_writer("counts", program.writer(env).trigger(availableNow=True))
    sales = program.sales().writeStream.format("parquet").option("path", str(program.folder / "sales"))
    env.add_writer("sales", sales.trigger(availableNow=True))
    result = env.execute("shops")
    assert program.rows() == program.expected()
    assert len(program.rows("sales")) == 40
    assert [(each.stream_id, each.end) for each in result.streams] == [
        ("counts", EndKind.ENDED_BY_ITSELF),
        ("sales", EndKind.ENDED_BY_ITSELF),
    ]
    stream = result.streams[0]
    (execution,) = program.executions()
    assert (execution.execution_id, execution.run_id) == (stream.execution_id, result.get_job_id())
    assert execution.status is ExecutionStatus.SUSPENDED
    assert result.get_net_runtime() >= (execution.ended_at_ms or 0) - execution.started_at_ms > 0


def test_the_max_parallelism_is_the_number_of_state_partitions(seen: dict[str, Any]) -> None:
    assert seen["offsets"].partitions == 3
    assert seen["conf"][SHUFFLE_PARTITIONS] == "3"


def test_the_parallelism_is_that_of_what_is_read(seen: dict[str, Any]) -> None:
    assert seen["conf"]["spark.sql.leafNodeDefaultParallelism"] == "2"


def test_the_buffer_timeout_is_the_period_of_the_trigger(seen: dict[str, Any]) -> None:
    assert seen["trigger"] == "ProcessingTimeTrigger(200)"


def test_without_chaining_no_operator_is_compiled_with_another(seen: dict[str, Any]) -> None:
    assert seen["conf"]["spark.sql.codegen.wholeStage"] == "false"
    assert "*(" not in seen["plan"]


@pytest.mark.core(thorough=True)
def test_the_state_backend_is_that_of_the_query(seen: dict[str, Any]) -> None:
    assert seen["offsets"].provider_class.endswith("RocksDBStateStoreProvider")
    assert seen["conf"]["spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"] == "true"


def test_checkpoints_are_taken_at_the_interval(seen: dict[str, Any]) -> None:
    taken = seen["program"].catalog.snapshots.of_stream("counts", kind=SnapshotKind.CHECKPOINT)
    began = sorted(snapshot.created_at_ms for snapshot in taken)
    assert {snapshot.trigger for snapshot in taken} == {SnapshotTrigger.PERIODIC}
    assert min(after - before for before, after in pairwise(began)) >= 250  # on another clock than the interval's


def test_the_stream_name_is_shown_in_spark(seen: dict[str, Any]) -> None:
    assert seen["name"] == "shops: counts"


def test_a_savepoint_goes_to_the_default_directory(seen: dict[str, Any]) -> None:
    assert seen["savepoint"].startswith(f"file://{seen['program'].folder}/savepoints/")


def test_the_session_has_its_own_settings_again_afterwards(seen: dict[str, Any]) -> None:
    assert seen["after"] == seen["before"] == "2"


def test_an_interrupt_keeps_everything_for_the_next_execution(seen: dict[str, Any]) -> None:
    program: Program = seen["program"]
    (execution,) = program.executions()
    assert (execution.status, execution.settled) == (ExecutionStatus.SUSPENDED, True)
    assert program.checkpoints() > 0


def test_a_program_that_is_stopped_with_a_savepoint_ends_well(program: Program) -> None:
    program.feed(2)
    env = program.environment().enable_checkpointing(200)
    env.add_writer("counts", program.writer(env))

    def stop() -> str | None:
        while program.checkpoints() == 0:
            time.sleep(0.1)
        savepoint = env.client().stop("counts").savepoint
        return savepoint.location if savepoint is not None else None

    with ThreadPoolExecutor() as threads:
        stopped = threads.submit(stop)
        (stream,) = env.execute().streams
        assert (stream.end, stream.savepoint) == (EndKind.FINISHED, stopped.result())


@pytest.mark.thorough(but="0-0")
@pytest.mark.parametrize(("timeout", "trigger"), [(None, 100), (0, 0), (-1, 0)])
def test_the_trigger_of_other_buffer_timeouts(program: Program, timeout: int | None, trigger: int) -> None:
    program.feed(1)
    env = program.environment()
    if timeout is not None:
        env.set_buffer_timeout(timeout)
    env.add_writer("counts", program.writer(env))
    triggers: list[str] = []

    def looked() -> bool:
        if any(query.lastProgress for query in program.spark.streams.active):
            triggers.append(_look(program.spark)["trigger"])
        return bool(triggers)

    execute_until(env, looked)
    assert triggers == [f"ProcessingTimeTrigger({trigger})"]


@pytest.mark.thorough
def test_chained_operators_are_compiled_together(program: Program) -> None:
    program.feed(1)
    env = program.environment()
    env.add_writer("counts", program.writer(env))
    plans: list[str] = []

    def looked() -> bool:
        if any(query.lastProgress for query in program.spark.streams.active):
            plans.append(_look(program.spark)["plan"])
        return bool(plans)

    execute_until(env, looked)
    assert env.is_chaining_enabled()
    assert "*(" in plans[0]


@pytest.mark.thorough
def test_a_failed_batch_is_run_again_after_the_fixed_delay(program: Program) -> None:
    program.feed(3)
    attempts: list[int] = []
    written: dict[int, list[tuple[object, ...]]] = {}

    def write(batch: DataFrame, batch_id: int) -> None:
        attempts.append(batch_id)
        if attempts == [0, 1]:
            raise RuntimeError("the sink is away for a moment")
        written[batch_id] = [tuple(row) for row in batch.collect()]

    env = program.environment()
    env.set_restart_strategy(RestartStrategies.fixed_delay_restart(1, 700))
    counts = program.counts(env.assign_timestamps_and_watermarks(program.sales(), "at", "10 minutes"))
    env.add_writer("counts", counts.writeStream.foreachBatch(write).trigger(availableNow=True))
    env.execute()
    failed, restarted = program.executions()
    assert attempts[:3] == [0, 1, 1]
    assert sorted(row for rows in written.values() for row in rows) == program.expected()
    assert (failed.status, restarted.status) == (ExecutionStatus.FAILED, ExecutionStatus.SUSPENDED)
    assert restarted.cause is StartCause.RESTART_IN_PLACE
    assert restarted.started_at_ms - (failed.ended_at_ms or 0) >= 700


@pytest.mark.thorough
def test_where_the_strategy_gives_up_the_whole_program_ends(program: Program) -> None:
    program.feed(1)

    def fail(_batch: DataFrame, _batch_id: int) -> None:
        raise RuntimeError("the sink is gone")

    env = program.environment()
    env.set_restart_strategy(RestartStrategies.no_restart())
    env.add_writer("counts", program.writer(env))
    env.add_writer("broken", program.sales().writeStream.foreachBatch(fail))
    with pytest.raises(StreamFailedError, match="'broken' failed") as failure:
        env.execute()
    assert "Restart deactivated" in str(failure.value)
    assert "the sink is gone" in str(failure.value)
    assert program.executions("broken")[-1].status is ExecutionStatus.FAILED
    assert program.executions("counts")[-1].status is ExecutionStatus.SUSPENDED
    assert program.spark.streams.active == []


@pytest.mark.core(thorough=True)
def test_a_second_execution_restores_the_latest_checkpoint_where_the_live_directory_is_lost(program: Program) -> None:
    program.feed(3)
    first = program.environment().enable_checkpointing(200).set_max_parallelism(3)
    first.get_checkpoint_config().set_externalized_checkpoint_cleanup(
        ExternalizedCheckpointCleanup.RETAIN_ON_CANCELLATION
    )
    first.add_writer("counts", program.writer(first))
    execute_until(first, lambda: program.checkpoints() > 0)
    shutil.rmtree(program.folder / "ckpt" / "live" / "counts")
    program.feed(3)

    second = program.environment()
    second.add_writer("counts", program.writer(second).trigger(availableNow=True))
    second.execute()
    # A batch after the checkpoint is replayed, if there was one.
    assert (program.executions()[-1].recovery or {})["kind"] in ("RESTORE", "REPLAY")
    assert program.offsets().partitions == 3
    assert program.rows() == program.expected()


def test_another_max_parallelism_is_refused_for_a_stream_with_state(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    program.feed(2)
    first = program.environment().set_max_parallelism(3)
    first.add_writer("counts", program.writer(first).trigger(availableNow=True))
    first.execute()
    program.feed(1)

    other = program.environment().set_max_parallelism(4)
    other.add_writer("counts", program.writer(other).trigger(availableNow=True))
    with pytest.raises(StatePartitionsError, match="in 3 partitions, but the max parallelism is 4"):
        other.execute()
    assert program.executions()[-1].settled

    rescaled = program.environment().set_parallelism(1)
    rescaled.add_writer("counts", program.writer(rescaled).trigger(availableNow=True))
    rescaled.execute()
    assert "counts: state stays in 3 partitions, not 1" in caplog.messages
    assert program.offsets().partitions == 3
    assert program.rows() == program.expected()


@pytest.mark.parametrize(
    ("characteristic", "keeps_the_column", "has_watermark"),
    [
        (TimeCharacteristic.EventTime, True, True),
        (TimeCharacteristic.IngestionTime, False, True),
        (TimeCharacteristic.ProcessingTime, False, False),
    ],
)
def test_the_time_characteristic_is_the_time_that_a_stream_goes_by(
    program: Program, characteristic: TimeCharacteristic, keeps_the_column: bool, has_watermark: bool
) -> None:
    program.feed(2)
    env = program.environment()
    env.set_stream_time_characteristic(characteristic)
    timed = env.assign_timestamps_and_watermarks(program.sales(), "at", "1 minute")
    output = program.folder / "timed"
    env.add_writer("timed", timed.writeStream.format("json").option("path", str(output)).trigger(availableNow=True))
    env.execute()
    assert {row["at"] < "2025" for row in map(json.loads, _lines(output))} == {keeps_the_column}
    assert (program.offsets("timed").watermark_ms > 0) is has_watermark


def _lines(folder: Path) -> list[str]:
    return [line for path in folder.glob("*.json") for line in path.read_text().splitlines()]


@pytest.mark.core
def test_the_plan_is_json_before_anything_runs(program: Program) -> None:
    program.feed(1)
    env = program.environment().set_parallelism(2)
    env.add_writer("counts", program.writer(env))
    nodes = json.loads(env.get_execution_plan())["nodes"]
    assert [node["id"] for node in nodes] == list(range(1, len(nodes) + 1))
    assert nodes[0]["pact"] == "Data Source"
    assert (nodes[-1]["type"], nodes[-1]["contents"]) == ("Sink: parquet", "counts")
    assert {"Aggregate", "EventTimeWatermark"} <= {node["type"] for node in nodes}
    assert all(below["id"] < node["id"] for node in nodes for below in node.get("predecessors", ()))
    assert program.spark.streams.active == []
    assert not (program.folder / "ckpt").exists()


def test_the_session_an_environment_starts_has_its_local_parallelism(spark: SparkSession) -> None:
    assert spark.sparkContext.master == "local[2]"
    env = StreamExecutionEnvironment.get_execution_environment()
    assert same_session(env.spark, spark)
    with pytest.raises(OptionError, match="must be set before Spark starts"):
        env.set_default_local_parallelism(3)


def test_a_registered_type_is_known_to_the_kryo_serializer_of_the_application(spark: SparkSession) -> None:
    assert application_settings(spark)["spark.serializer"] == KRYO
    jvm: Any = spark._jvm
    jsc: Any = spark.sparkContext._jsc
    resolver = jvm.org.apache.spark.serializer.KryoSerializer(jsc.sc().conf()).newKryo().getClassResolver()
    assert resolver.getRegistration(jvm.java.lang.Class.forName(REGISTERED)) is not None
    assert resolver.getRegistration(jvm.java.lang.Class.forName("java.util.concurrent.atomic.AtomicBoolean")) is None


def test_a_registrator_gives_a_type_its_serializer(spark: SparkSession) -> None:
    jvm: Any = spark._jvm
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.cook(
        "public class Gives implements org.apache.spark.serializer.KryoRegistrator {"
        " public void registerClasses(com.esotericsoftware.kryo.Kryo kryo) {"
        "  kryo.register(java.util.Random.class, new com.esotericsoftware.kryo.serializers.JavaSerializer()); } }"
    )
    conf = jvm.org.apache.spark.SparkConf(False)
    for name, value in KryoRegistrations().with_registrator("java.util.Random", "Gives").spark_settings().items():
        conf.set(name, value)
    serializer = jvm.org.apache.spark.serializer.KryoSerializer(conf)
    serializer.setDefaultClassLoader(compiler.getClassLoader())
    registration = serializer.newKryo().getRegistration(jvm.java.lang.Class.forName("java.util.Random"))
    assert registration.getSerializer().getClass().getSimpleName() == "JavaSerializer"


def test_a_registration_that_comes_too_late_is_refused(program: Program) -> None:
    env = program.environment()
    env.register_type(REGISTERED)
    with pytest.raises(OptionError, match="read by Spark when the application starts"):
        env.register_type("com.example.Event")
    assert env.get_config().kryo.types == (REGISTERED,)


def test_a_kryo_class_that_does_not_exist_is_refused(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    env = program.environment()
    types = f"{REGISTERED},no.such.Type"
    monkeypatch.setattr(environment, "application_settings", lambda spark: {SERIALIZER: KRYO, KRYO_TYPES: types})
    with pytest.raises(OptionError, match=r"name no\.such\.Type, but must name classes that Spark's JVM can load"):
        env.register_type("no.such.Type")
    env.register_type(REGISTERED)
    assert env.get_config().kryo.types == (REGISTERED,)


def test_what_is_added_must_be_a_writer_of_its_own_name_and_this_session(program: Program) -> None:
    program.feed(1)
    env = program.environment()
    env.add_writer("counts", program.writer(env))
    with pytest.raises(OptionError, match="another writer has that name"):
        env.add_writer("counts", program.writer(env))
    with pytest.raises(OptionError, match="cannot name a folder"):
        env.add_writer("a/b", program.writer(env))
    with pytest.raises(OptionTypeError, match="before it is started"):
        env.add_writer("sales", program.sales())  # type: ignore[arg-type]
    elsewhere = program.spark.newSession().readStream.format("rate").load()
    with pytest.raises(OptionError, match="another Spark session"):
        env.add_writer("rate", elsewhere.writeStream)
