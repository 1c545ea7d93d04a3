"""What an environment says before Spark is there; the answers of PyFlink are in tests/flink."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.flink import environment
from dagster_ckpt.flink.environment import StreamExecutionEnvironment
from dagster_ckpt.flink.execution_config import ExecutionConfig, ExecutionMode, KryoRegistrations
from dagster_ckpt.flink.program import deployment_below
from dagster_ckpt.policies.retention import Latest, NewestPer
from dagster_ckpt.policies.trigger import EveryBatches, Interval
from dagster_ckpt.values.modes import CheckpointingMode, TimeCharacteristic


def test_everything_is_below_one_folder_by_default(tmp_path: Path) -> None:
    places = deployment_below(tmp_path, live_root=None, catalog_url=None, storage_path=None)
    assert places.live_root == f"file://{tmp_path}/live"
    assert places.catalog_url == f"sqlite:///{tmp_path}/catalog.db"
    assert places.storage.checkpoint_location.url == f"file://{tmp_path}/snapshots"


def test_each_place_can_be_named(tmp_path: Path) -> None:
    places = deployment_below(
        tmp_path,
        live_root="hdfs://nn/live",
        catalog_url="postgresql+psycopg://db/c",
        storage_path="s3://bucket/snapshots",
    )
    assert (places.live_root, places.catalog_url) == ("hdfs://nn/live", "postgresql+psycopg://db/c")
    assert places.storage.checkpoint_location.url == "s3://bucket/snapshots"


def test_nothing_is_made_before_something_runs(tmp_path: Path) -> None:
    StreamExecutionEnvironment.get_execution_environment(folder=tmp_path / "program").enable_checkpointing(1000)
    assert list(tmp_path.iterdir()) == []


def test_a_setter_that_refuses_changes_nothing() -> None:
    env = StreamExecutionEnvironment.get_execution_environment()
    env.enable_checkpointing(1000)
    with pytest.raises(OptionTypeError):
        env.enable_checkpointing(2000, "EXACTLY_ONCE")  # type: ignore[arg-type]
    with pytest.raises(OptionError):
        env.set_max_parallelism(0)
    assert (env.get_checkpoint_interval(), env.get_max_parallelism()) == (1000, -1)


def test_state_has_as_many_partitions_as_the_parallelism_where_nothing_else_is_said() -> None:
    assert ExecutionConfig(parallelism=4).spark_settings()["spark.sql.shuffle.partitions"] == "4"
    assert ExecutionConfig(parallelism=4, max_parallelism=8).spark_settings()["spark.sql.shuffle.partitions"] == "8"
    assert ExecutionConfig().spark_settings() == {}


def test_a_parallelism_above_the_max_parallelism_is_refused() -> None:
    with pytest.raises(OptionError, match="parallelism is 8, but must be at most the max parallelism, which is 4"):
        ExecutionConfig(parallelism=8, max_parallelism=4).spark_settings()


def test_what_is_set_on_the_config_of_an_environment_is_set_on_the_environment() -> None:
    env = StreamExecutionEnvironment.get_execution_environment()
    config = env.get_config()
    assert (config.get_auto_watermark_interval(), config.is_closure_cleaner_enabled()) == (200, True)
    assert (config.get_execution_mode(), config.get_global_job_parameters()) == (ExecutionMode.PIPELINED, {})
    changed = config.set_auto_watermark_interval(50).disable_closure_cleaner()
    changed.set_global_job_parameters({"region": "eu"})
    assert changed is config
    for each in (config, env.get_config()):
        assert (each.get_auto_watermark_interval(), each.is_closure_cleaner_enabled()) == (50, False)
        assert each.get_global_job_parameters() == {"region": "eu"}
    assert env.get_config().enable_closure_cleaner().is_closure_cleaner_enabled()
    # An environment of its own has its own.
    assert StreamExecutionEnvironment.get_execution_environment().get_config().get_auto_watermark_interval() == 200


@pytest.mark.parametrize(("characteristic", "interval"), [("ProcessingTime", 0), ("IngestionTime", 200)])
def test_a_time_characteristic_sets_the_watermark_interval_as_in_flink(characteristic: str, interval: int) -> None:
    env = StreamExecutionEnvironment.get_execution_environment()
    env.get_config().set_auto_watermark_interval(7)
    env.set_stream_time_characteristic(TimeCharacteristic[characteristic])
    assert env.get_config().get_auto_watermark_interval() == interval


def test_a_config_refuses_what_flink_refuses_and_changes_nothing() -> None:
    env = StreamExecutionEnvironment.get_execution_environment()
    config = env.get_config()
    with pytest.raises(OptionError, match="auto watermark interval is -1"):
        config.set_auto_watermark_interval(-1)
    for wrong in (None, ["region"], {"region": 1}):
        with pytest.raises(OptionTypeError, match=r"global job parameters are .* must be a dict of text by name"):
            config.set_global_job_parameters(wrong)  # type: ignore[arg-type]
    assert (config, env.get_config()) == (env.get_config(), config)


def test_only_what_an_application_lacks_of_the_registrations_is_missing() -> None:
    kryo = KryoRegistrations().with_type("a.B").with_registrator("a.C", "a.Registrator")
    assert kryo.missing_in(kryo.with_type("a.D").spark_settings()) == {}
    assert kryo.missing_in({"spark.kryo.classesToRegister": "a.B,a.C"}) == {
        "spark.serializer": "org.apache.spark.serializer.KryoSerializer",
        "spark.kryo.registrator": "a.Registrator",
    }


@pytest.mark.parametrize("starts", [["no.such.Type", "a.Registrator"], []])
def test_an_application_with_an_unknown_kryo_class_is_stopped_again(
    starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    application = Mock()
    monkeypatch.setattr(environment, "start_application", lambda threads, settings: application)
    monkeypatch.setattr(environment, "unknown_classes", lambda spark, names: [each for each in names if each in starts])
    env = StreamExecutionEnvironment.get_execution_environment()
    env.register_type_with_kryo_serializer("no.such.Type", "a.Registrator")
    if starts:
        with pytest.raises(OptionError, match=r"Kryo registrations name no\.such\.Type, a\.Registrator, but must"):
            _ = env.spark
    else:
        assert env.spark is application
    assert application.stop.called is bool(starts)


def test_only_a_classic_session_can_be_given() -> None:
    with pytest.raises(OptionTypeError, match="must be a classic SparkSession"):
        StreamExecutionEnvironment.get_execution_environment(spark="local[2]")  # type: ignore[arg-type]


def test_every_option_is_described() -> None:
    described = StreamExecutionEnvironment.get_execution_environment().describe()
    assert {line.option for line in described} == {
        *("parallelism", "max_parallelism", "buffer_timeout", "operator_chaining", "time_characteristic"),
        *("changelog_state_backend", "kryo", "auto_watermark_interval", "closure_cleaner", "global_job_parameters"),
    }


def test_an_environment_takes_policies() -> None:
    environment = StreamExecutionEnvironment.get_execution_environment()
    config = environment.get_checkpoint_config()
    assert (config.get_retention_policy(), config.get_trigger_policy()) == (Latest(1), None)
    environment.enable_checkpointing(1_000)
    assert config.get_trigger_policy() == Interval(1_000)
    config.set_retention_policy(Latest(2) | NewestPer("day", 3))
    with pytest.raises(OptionError, match="interval is 1000 ms, but must be left out where a trigger is set"):
        config.set_trigger_policy(EveryBatches(5)).validate()
    assert str(config.get_retention_policy()).startswith("(Latest(count=2) | NewestPer(")


def test_the_environment_answers_for_its_checkpoint_config() -> None:
    environment = StreamExecutionEnvironment.get_execution_environment()
    assert environment.get_checkpointing_consistency_mode() is CheckpointingMode.EXACTLY_ONCE
    assert (environment.is_unaligned_checkpoints_enabled(), environment.is_force_unaligned_checkpoints()) == (
        False,
        False,
    )
    environment.get_checkpoint_config().enable_unaligned_checkpoints().set_force_unaligned_checkpoints()
    environment.enable_checkpointing(1_000, CheckpointingMode.AT_LEAST_ONCE)
    assert environment.get_checkpointing_consistency_mode() is CheckpointingMode.AT_LEAST_ONCE
    assert (environment.is_unaligned_checkpoints_enabled(), environment.is_force_unaligned_checkpoints()) == (
        True,
        True,
    )
