"""Every option in two spellings: Python objects, and Dagster config. Both give equal values."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
import yaml

from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.config.checkpoint_storage import (
    CustomCheckpointStorage,
    DeploymentStorage,
    FileSystemCheckpointStorage,
    JobManagerCheckpointStorage,
)
from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend, PredefinedOptions
from dagster_ckpt.config.state_backend import CustomStateBackend, HashMapStateBackend
from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.settings import CheckpointSettings, RestartSettings
from dagster_ckpt.orchestration.stream import stream_handle
from dagster_ckpt.orchestration.streaming_asset import streaming_asset
from dagster_ckpt.policies.restart import RestartStrategies
from dagster_ckpt.policies.retention import Latest, NewestPer
from dagster_ckpt.policies.trigger import EveryBatches, Interval

ALL_CHECKPOINT_OPTIONS: dict[str, Any] = {
    "mode": "AT_LEAST_ONCE",
    "interval": 60_000,
    "timeout": 5_000,
    "min_pause": 30_000,
    "max_concurrent": 3,
    "tolerable_failures": 2,
    "cleanup": "RETAIN_ON_CANCELLATION",
    "unaligned": True,
    "alignment_timeout": 5_000,
    "force_unaligned": True,
    "num_retained": 4,
    "count_savepoints": True,
    "prefer_checkpoint_for_recovery": True,
    "recovery_depth": 5,
    "roll_back_tables": False,
    "max_replayed_batches": 7,
    "storage": "file:///data/checkpoints",
}
# Instead of num_retained and interval.
POLICIES: dict[str, Any] = {
    "retention": {"any_of": [{"latest": 3}, {"newest_per": {"period": "day", "count": 7}}]},
    "trigger": {"any_of": [{"interval": 60_000}, {"every_batches": 100}]},
}


def through_dagster(value: type[Any], config: dict[str, Any]) -> Any:
    """Give config to Dagster as a person does, and return what an op gets of it."""
    got: list[Any] = []
    if issubclass(value, dg.ConfigurableResource):

        @dg.op(required_resource_keys={"it"})
        def take(context: dg.OpExecutionContext) -> None:
            got.append(context.resources.it)

        resources = {"it": value.configure_at_launch()}
        run_config: dict[str, Any] = {"resources": {"it": {"config": config}}}
    else:

        def compute(context: dg.OpExecutionContext) -> None:
            got.append(value(**context.op_config))

        take = dg.op(config_schema=value.to_config_schema().as_field(), name="take")(compute)
        resources, run_config = {}, {"ops": {"take": {"config": config}}}
    job = dg.GraphDefinition("job", node_defs=[take]).to_job(resource_defs=resources)
    assert job.execute_in_process(run_config=run_config).success
    return got[0]


def test_the_config_offers_every_checkpointing_option_with_the_same_default() -> None:
    keywords = {
        name: parameter.default
        for name, parameter in inspect.signature(CheckpointConfig.__init__).parameters.items()
        if name != "self"
    }
    assert set(CheckpointSettings.model_fields) == set(keywords) == set(ALL_CHECKPOINT_OPTIONS | POLICIES)
    assert CheckpointSettings().checkpoint_config() == CheckpointConfig()


@pytest.mark.parametrize("given", [{}, ALL_CHECKPOINT_OPTIONS, POLICIES], ids=["defaults", "every option", "policies"])
def test_checkpointing_options_are_equal_in_both_spellings(given: dict[str, Any]) -> None:
    wanted = CheckpointConfig(**given)
    assert through_dagster(CheckpointSettings, given).checkpoint_config() == wanted
    assert CheckpointSettings.model_validate(yaml.safe_load(yaml.safe_dump(given))).checkpoint_config() == wanted


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, RestartStrategies.fall_back_restart()),
        ({"kind": "NONE"}, RestartStrategies.no_restart()),
        ({"kind": "FIXED_DELAY"}, RestartStrategies.fixed_delay_restart(1, 1_000)),
        ({"kind": "FIXED_DELAY", "attempts": 5, "delay": 7}, RestartStrategies.fixed_delay_restart(5, 7)),
        (
            {"kind": "FAILURE_RATE", "max_failures_per_interval": 3, "failure_rate_interval": 9, "delay": 2},
            RestartStrategies.failure_rate_restart(3, 9, 2),
        ),
        ({"kind": "EXPONENTIAL_DELAY"}, RestartStrategies.exponential_delay_restart()),
        (
            {
                "kind": "EXPONENTIAL_DELAY",
                "initial_backoff": 2,
                "max_backoff": 3,
                "backoff_multiplier": 2.0,
                "reset_backoff_threshold": 4,
                "jitter_factor": 0.5,
                "attempts_before_reset_backoff": 6,
            },
            RestartStrategies.exponential_delay_restart(2, 3, 2.0, 4, 0.5, attempts_before_reset_backoff=6),
        ),
    ],
)
def test_restart_strategies_are_equal_in_both_spellings(given: dict[str, Any], wanted: Any) -> None:
    assert through_dagster(RestartSettings, given).restart_strategy() == wanted
    assert RestartSettings.model_validate(given).restart_strategy() == wanted


def test_policies_are_objects_in_either_spelling() -> None:
    options = through_dagster(CheckpointSettings, POLICIES).checkpoint_config().options
    assert options.retention_policy == Latest(3) | NewestPer("day", 7)
    assert options.trigger_policy == Interval(60_000) | EveryBatches(100)
    assert options.is_checkpointing_enabled


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trigger": {"every_batches": 10}, "interval": 60_000}, "interval is 60000 ms, but must be left out"),
        ({"retention": {"latest": 3}, "num_retained": 2}, "num_retained is 2, but must be left out"),
    ],
)
def test_a_policy_and_the_option_that_it_replaces_are_never_both_set(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        _ = CheckpointSettings(**given).checkpoint_config().options


def test_a_run_may_replace_a_policy_by_an_option_and_the_other_way_round() -> None:
    by_number = CheckpointConfig(interval=60_000, num_retained=2).options
    by_policy = by_number.overridden(POLICIES)
    assert (by_policy.interval, by_policy.retention_policy) == (None, Latest(3) | NewestPer("day", 7))
    again = by_policy.overridden({"interval": 60_000, "num_retained": 2})
    assert again == by_number


def test_a_streaming_asset_takes_either_spelling() -> None:
    @streaming_asset(
        checkpointing=CheckpointSettings(**ALL_CHECKPOINT_OPTIONS), restart_strategy=RestartSettings(attempts=2)
    )
    def from_config(context: Any) -> Any: ...

    @streaming_asset(checkpointing=CheckpointConfig(**ALL_CHECKPOINT_OPTIONS))
    def from_object(context: Any) -> Any: ...

    assert from_config.spec.options == from_object.spec.options
    assert from_config.spec.restart == from_object.spec.restart


def rocksdb_with_everything() -> EmbeddedRocksDBStateBackend:
    backend = EmbeddedRocksDBStateBackend(False, settings={"spark.sql.streaming.stateStore.rocksdb.blockSizeKB": "16"})
    backend.set_predefined_options(PredefinedOptions.FLASH_SSD_OPTIMIZED)
    backend.set_options("options_factories.TwiceTheCache")
    backend.set_db_storage_paths("/mnt/a", "/mnt/b")
    backend.set_number_of_transfer_threads(9)
    return backend


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, lambda: EmbeddedRocksDBStateBackend(True)),
        (
            {
                "kind": "ROCKSDB",
                "incremental": False,
                "predefined_options": "FLASH_SSD_OPTIMIZED",
                "options_factory": "options_factories.TwiceTheCache",
                "db_storage_paths": ["/mnt/a", "/mnt/b"],
                "transfer_threads": 9,
                "settings": {"spark.sql.streaming.stateStore.rocksdb.blockSizeKB": "16"},
            },
            rocksdb_with_everything,
        ),
        ({"kind": "HASHMAP"}, HashMapStateBackend),
        (
            {"kind": "CUSTOM", "provider_class": "a.B", "settings": {"spark.x": "1"}},
            lambda: CustomStateBackend("a.B", {"spark.x": "1"}),
        ),
    ],
)
def test_state_backends_are_equal_in_both_spellings(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], wanted: Any
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "config"))
    got = through_dagster(StateBackendResource, {"live_directory": "/live", **given}).backend()
    assert got == wanted()
    assert got.spark_settings() == wanted().spark_settings()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (
            {"path": "s3://b/c", "storage_options": {"key": "k"}},
            FileSystemCheckpointStorage("s3://b/c", savepoint_path="s3://b/c/savepoints", storage_options={"key": "k"}),
        ),
        (
            {"path": "s3://b/c", "savepoint_path": "s3://b/s", "file_state_size_threshold": 5, "write_buffer_size": 6},
            FileSystemCheckpointStorage("s3://b/c", 5, 6, savepoint_path="s3://b/s"),
        ),
        ({"kind": "JOBMANAGER"}, JobManagerCheckpointStorage()),
        (
            {"kind": "JOBMANAGER", "path": "file:///c", "max_state_size": 7},
            JobManagerCheckpointStorage("file:///c", 7, savepoint_path="file:///c/savepoints"),
        ),
        (
            {"kind": "CUSTOM", "factory": "a.b:c", "factory_settings": {"depth": 3}},
            CustomCheckpointStorage("a.b:c", {"depth": 3}),
        ),
    ],
)
def test_storages_are_equal_in_both_spellings(given: dict[str, Any], wanted: Any) -> None:
    assert through_dagster(CheckpointStorageResource, given).storage() == wanted


def test_an_absolute_path_is_a_local_directory_and_a_relative_one_is_refused() -> None:
    resource = CheckpointStorageResource(path="/data/c", savepoint_path="/data/s")

    assert resource.storage() == FileSystemCheckpointStorage("file:///data/c", savepoint_path="file:///data/s")
    assert CheckpointStorageResource(path="/data/c").deployment().savepoint_path == "file:///data/c/savepoints"
    assert CheckpointSettings(storage="/data/c").checkpoint_config().options.storage == FileSystemCheckpointStorage(
        "file:///data/c"
    )
    with pytest.raises(OptionError, match=r"path is 'data/c', a relative path.* Give the absolute path, such as /"):
        CheckpointStorageResource(path="data/c").storage()


def test_a_storage_set_in_code_takes_from_the_deployment_what_it_leaves_unset() -> None:
    resource = CheckpointStorageResource(path="s3://b/c", write_buffer_size=6, storage_options={"key": "k"})
    assert resource.deployment() == DeploymentStorage(
        "s3://b/c", "s3://b/c/savepoints", None, 6, storage_options={"key": "k"}
    )
    storage = FileSystemCheckpointStorage("s3://other/c").configure(resource.deployment())
    assert storage == FileSystemCheckpointStorage(
        "s3://other/c", None, 6, savepoint_path="s3://b/c/savepoints", storage_options={"key": "k"}
    )


def test_transfer_threads_are_the_threads_of_the_store_that_snapshots_go_to(tmp_path: Path) -> None:
    @streaming_asset()
    def orders(context: Any) -> Any: ...

    resources = SimpleNamespace(
        checkpoint_storage=CheckpointStorageResource(path=f"file://{tmp_path}/c"),
        state_backend=StateBackendResource(live_directory="/live", transfer_threads=7),
        checkpoint_catalog=CheckpointCatalogResource(url=f"sqlite:///{tmp_path}/catalog.db"),
    )
    job = stream_handle(orders, resources)
    assert job.backend == resources.state_backend.backend()
    assert job.store._layout.transfer_threads == 7


@pytest.mark.parametrize(
    ("resource", "message"),
    [
        (
            StateBackendResource(live_directory="/l", kind="HASHMAP", transfer_threads=3),
            "takes no transfer_threads, but transfer_threads has 3. Remove it, or choose kind ROCKSDB",
        ),
        (
            StateBackendResource(live_directory="/l", provider_class="a.B"),
            "kind is ROCKSDB, which takes no provider_class",
        ),
        (
            CheckpointStorageResource(path="file:///c", max_state_size=3),
            "takes no max_state_size.*choose kind JOBMANAGER",
        ),
        (
            CheckpointStorageResource(path="file:///c", factory_settings={"a": "secret"}),
            r"factory_settings has \['a'\]",
        ),
        (CheckpointStorageResource(), "checkpoint_path must not be None"),
        (StateBackendResource(live_directory="/l", transfer_threads=0), "number of transfer threads is 0"),
        (StateBackendResource(live_directory="/l", db_storage_paths=["rel"]), "db storage path is 'rel'"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_do(resource: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        resource.backend() if isinstance(resource, StateBackendResource) else resource.storage()


@pytest.mark.parametrize(
    ("kind", "error"), [("CUSTOM", OptionTypeError), ("JOBMANAGER", OptionError)], ids=["no factory", "a relative path"]
)
def test_a_storage_that_lacks_what_its_kind_needs_is_refused(kind: str, error: type[Exception]) -> None:
    path = "relative" if kind == "JOBMANAGER" else None
    with pytest.raises(error):
        CheckpointStorageResource(kind=kind, path=path).storage()
