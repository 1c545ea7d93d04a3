"""Streams in YAML: the example of docs/components.md runs and restarts, and mistakes are told by their field."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster.components.core.component_tree import ComponentTree
from dagster.components.resolved.errors import ResolutionException
from dagster.components.testing import create_defs_folder_sandbox
from dagster_shared.libraries import DagsterLibraryRegistry
from orchestration_catalog import begin_execution, begin_snapshot, register
from pyspark.sql import DataFrame, SparkSession

from dagster_ckpt.client.health_facts import HealthSettings
from dagster_ckpt.errors import CkptError
from dagster_ckpt.orchestration._compat import plan_outside_runs
from dagster_ckpt.orchestration.component import StreamsComponent
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.settings import CheckpointSettings, RestartSettings, UpgradeSettings
from dagster_ckpt.orchestration.stream import Stream
from dagster_ckpt.orchestration.streaming_asset import streaming_asset
from dagster_ckpt.orchestration.yaml_stream import EveryMinute, Health
from dagster_ckpt.policies.restart import FALLBACK_RESTART
from dagster_ckpt.policies.retention import Latest, NewestPer
from dagster_ckpt.policies.trigger import EveryBatches, Interval
from tests.support.as_writer import as_writer
from tests.support.small_spark import lay_file, small_spark

PAGE = Path(__file__).parents[2] / "docs/components.md"
EXAMPLE, DOWNSTREAM = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
if dg.__version__.startswith("1.12."):
    # As docs/compatibility.md says.
    DOWNSTREAM = DOWNSTREAM.replace("dg.AutomationCondition.", "automation_condition.")
SHOPS = ("north", "south")


@streaming_asset()
def written_in_python(context: Any) -> Any: ...


def doubled(rows: DataFrame, more: DataFrame | None = None) -> DataFrame:
    return rows.selectExpr("value * 2 AS value") if more is None else rows.unionByName(more)


def keep(rows: DataFrame, batch_id: int) -> None: ...


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """The session that the example's resource finds, too."""
    with small_spark() as session:
        yield session


def component(**attributes: Any) -> StreamsComponent:
    made = StreamsComponent.resolve_from_dict(attributes)
    assert isinstance(made, StreamsComponent)
    return made


def a_stream(**more: Any) -> dict[str, Any]:
    job = {"name": "rates", "sources": [{"name": "rates", "format": "rate"}], "sink": {"format": "console"}, **more}
    return {name: value for name, value in job.items() if value is not None}


def stream_of(**more: Any) -> Stream:
    [stream] = component(streams=[a_stream(**more)]).all_streams()
    return stream


class TestTheExampleOfThePage:
    @pytest.fixture(scope="class")
    @classmethod
    def home(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
        home = tmp_path_factory.mktemp("streams")
        (home / "landing").mkdir()
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("STREAMS_HOME", str(home))
            yield home

    @pytest.fixture(scope="class")
    @classmethod
    def definitions(cls, home: Path) -> Iterator[dg.Definitions]:
        with create_defs_folder_sandbox() as sandbox:
            path = sandbox.scaffold_component(
                component_cls=StreamsComponent, defs_yaml_contents=yaml.safe_load(EXAMPLE)
            )
            with sandbox.load_component_and_build_defs(defs_path=path) as (_, definitions):
                yield definitions

    def test_it_says_on_the_page_what_the_yaml_says(self, definitions: dg.Definitions) -> None:
        [spec] = [spec for spec in definitions.resolve_all_asset_specs() if spec.key.path[-1] == "hourly_orders"]

        assert spec.key == dg.AssetKey(["shop", "hourly_orders"])
        assert (spec.group_name, spec.owners, spec.code_version) == ("shop", ["team:sales"], "v1")
        assert spec.kinds == {"spark", "parquet"}
        assert spec.tags["tier"] == "gold"
        assert [dep.asset_key for dep in spec.deps] == [dg.AssetKey(["shop", "landing"])]
        assert spec.metadata["dagster_ckpt/stream_id"] == "hourly_orders"
        assert spec.metadata["dagster_ckpt/interval_ms"] == 60_000
        assert spec.freshness_policy is not None
        schedule = definitions.resolve_schedule_def("hourly_orders_savepoint_schedule")
        assert schedule.cron_schedule == "0 3 * * *"

    @pytest.mark.spark
    def test_it_runs_and_after_the_loss_of_its_directory_goes_on_from_a_savepoint(
        self, home: Path, definitions: dg.Definitions, spark: SparkSession
    ) -> None:
        with dg.DagsterInstance.ephemeral() as instance:
            for hours in (range(4), range(4, 9)):
                land(home, hours)
                assert run(definitions, instance, "hourly_orders_stream")
                if hours.start == 0:
                    config = {"trigger_savepoint": {"config": {"stream_id": "hourly_orders", "label": "by-hand"}}}
                    assert run(definitions, instance, "trigger_savepoint_job", config)
                    shutil.rmtree(home / "live")

        written = spark.read.parquet(str(home / "hourly_orders")).collect()
        landed = spark.read.schema("at timestamp, shop string, amount long").json(str(home / "landing"))
        landed.createOrReplaceTempView("landed")
        # The last hour is not over: its window is still open.
        expected = spark.sql(
            "SELECT date_trunc('hour', at) AS hour, shop, count(*) AS orders, sum(amount) AS amount FROM landed "
            "WHERE at < (SELECT max(date_trunc('hour', at)) FROM landed) GROUP BY ALL"
        ).collect()
        assert len(expected) == 8 * len(SHOPS)
        assert sorted(map(tuple, written)) == sorted(map(tuple, expected))
        assert restored_from(home) == "by-hand"


def land(home: Path, hours: range) -> None:
    """A file for each hour of 2013-01-01; the amounts tell them apart."""
    for hour in hours:
        orders = [
            {"at": f"2013-01-01T{hour:02}:{minute:02}:00Z", "shop": shop, "amount": hour * 1000 + minute}
            for minute in range(0, 60, 7)
            for shop in SHOPS
        ]
        lay_file(home / "landing", hour, orders)


def run(definitions: dg.Definitions, instance: dg.DagsterInstance, job: str, ops: dict[str, Any] | None = None) -> bool:
    return definitions.resolve_job_def(job).execute_in_process({"ops": ops or {}}, instance=instance).success


def restored_from(home: Path) -> str | None:
    """The label of the snapshot that the newest execution began with."""
    from dagster_ckpt.catalog.catalog import Catalog

    catalog = Catalog(f"sqlite:///{home}/catalog.db")
    execution = catalog.executions.latest("hourly_orders")
    assert execution is not None
    [snapshot] = [each for each in catalog.snapshots.completed("hourly_orders") if each.label == "by-hand"]
    label = snapshot.label if snapshot.snapshot_id in json.dumps(execution.recovery) else None
    catalog.close()
    return label


class TestFields:
    @pytest.mark.parametrize(
        "settings", [EveryMinute, RestartSettings, UpgradeSettings, CheckpointStorageResource, StateBackendResource]
    )
    def test_settings_take_every_option_by_the_same_name_and_description(self, settings: type[Any]) -> None:
        schema = StreamsComponent.model().model_json_schema()["$defs"][f"{settings.__name__}InYaml"]

        assert set(schema["properties"]) == set(settings.model_fields)
        assert all(
            schema["properties"][field]["description"] == info.description
            for field, info in settings.model_fields.items()
        )

    def test_every_field_of_a_stream_is_described(self) -> None:
        definitions = StreamsComponent.model().model_json_schema()["$defs"]
        ours = [
            "Source",
            "Transform",
            "Sink",
            "Trigger",
            "Savepoints",
            "Freshness",
            "Health",
            "StreamDeclarationModel",
            "StreamResourcesModel",
        ]
        top = StreamsComponent.model().model_json_schema()["properties"]
        assert all(len(field.get("description", "")) > 15 for field in top.values())
        for model in ours:
            for name, field in definitions[model]["properties"].items():
                assert len(field.get("description", "")) > 15, f"{model}.{name} has no description"

    def test_checkpointing_restart_and_upgrade_are_those_of_python(self) -> None:
        stream = stream_of(
            checkpointing={"interval": 5_000, "mode": "AT_LEAST_ONCE"},
            restart_strategy={"kind": "FIXED_DELAY", "attempts": 3},
            upgrade={"mode": "LAST_STATE", "preflight": False},
            desired_state="RUNNING",
        )

        assert (
            stream.spec.options == CheckpointSettings(interval=5_000, mode="AT_LEAST_ONCE").checkpoint_config().options
        )
        assert stream.spec.restart.get_description() == (
            RestartSettings(kind="FIXED_DELAY", attempts=3).restart_strategy().get_description()
        )
        assert stream.spec.upgrade == UpgradeSettings(mode="LAST_STATE", preflight=False).upgrade_policy()
        assert stream.spec.desired_state is not None
        assert stream.spec.desired_state.name == "RUNNING"

    def test_policies_replace_the_default_interval_and_number(self) -> None:
        stream = stream_of(
            checkpointing={
                "trigger": {"any_of": [{"interval": 5_000}, {"every_batches": 10}]},
                "retention": {"any_of": [{"latest": 3}, {"newest_per": {"period": "day", "count": 7}}]},
            },
            restart_strategy={"kind": "OWN", "own": "dagster_ckpt.policies.restart:FALLBACK_RESTART"},
        )

        assert stream.spec.options.trigger_policy == Interval(5_000) | EveryBatches(10)
        assert stream.spec.options.retention_policy == Latest(3) | NewestPer("day", 7)
        assert stream.spec.restart == FALLBACK_RESTART

    def test_thresholds_of_health_have_the_names_and_defaults_of_python(self) -> None:
        assert Health().settings() == HealthSettings()
        assert set(Health.model_fields) == {field.name for field in fields(HealthSettings)}

    def test_by_default_a_checkpoint_is_taken_every_minute(self) -> None:
        assert stream_of().spec.options.interval == 60_000
        assert stream_of(checkpointing={"num_retained": 5}).spec.options.interval == 60_000
        assert stream_of(checkpointing={"interval": None}).spec.options.interval is None

    def test_a_job_id_of_its_own_and_several_assets(self) -> None:
        stream = stream_of(stream_id="old-name", assets=[{"key": "shop/good"}, {"key": "shop/bad"}])

        assert stream.stream_id == "old-name"
        assert [key.to_user_string() for key in stream.keys] == ["shop/good", "shop/bad"]

    def test_text_that_looks_like_a_number_stays_text_and_numbers_become_text(self) -> None:
        made = component(
            streams=[a_stream()],
            resources={
                "spark_config": {"spark.sql.shuffle.partitions": 2, "spark.ui.enabled": False},
                "checkpoint_storage": {"path": "s3://bucket/c", "storage_options": {"secret": "00123"}},
            },
        )

        named = made.resources.given() if made.resources else {}
        assert set(named) == {"pyspark", "checkpoint_storage"}
        assert named["pyspark"].spark_config == {"spark.sql.shuffle.partitions": "2", "spark.ui.enabled": "false"}
        assert named["checkpoint_storage"].storage_options == {"secret": "00123"}

    def test_streams_of_python_join_those_of_yaml(self) -> None:
        path = f"{__name__}:written_in_python"

        streams = component(streams=[a_stream()], declared_in_python=[path]).all_streams()

        assert [stream.stream_id for stream in streams] == ["rates", "written_in_python"]


class TestHealth:
    @pytest.mark.parametrize(
        ("health", "passed"), [(None, False), ({"failures_to_warn": 5, "failures_to_fail": 9}, True)]
    )
    def test_the_sensor_judges_by_the_thresholds_of_the_yaml(
        self, tmp_path: Path, health: dict[str, Any] | None, passed: bool
    ) -> None:
        resource = CheckpointCatalogResource(url=f"sqlite:///{tmp_path}/catalog.db")
        catalog = resource.catalog()
        register(catalog, "rates-1")
        begin_execution(catalog, "rates-1", "run-1")
        for _ in range(4):
            as_writer(catalog).snapshots.fail(begin_snapshot(catalog, "rates-1").snapshot_id, "the disk is full")
        made = component(
            streams=[a_stream(stream_id="rates-1", health=health)],
            health_checks=["consecutive_failures"],
            resources={
                "spark_config": {},
                "checkpoint_storage": {"path": f"file://{tmp_path}"},
                "state_backend": {"live_directory": str(tmp_path)},
                "checkpoint_catalog": {"url": resource.url},
            },
        )
        sensor = made.build_defs(ComponentTree.for_test().load_context).resolve_sensor_def("checkpoint_health_sensor")

        with dg.DagsterInstance.ephemeral() as instance:
            context = dg.build_sensor_context(instance, resources={"checkpoint_catalog": resource})
            [evaluation] = sensor.evaluate_tick(context).asset_events

        assert (evaluation.check_name, evaluation.passed) == ("consecutive_failures", passed)
        catalog.close()


class TestDownstream:
    """What another component declares with a condition on the stream's asset."""

    def test_the_example_of_the_page_is_started_by_checkpoints_while_the_stream_runs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STREAMS_HOME", str(tmp_path))
        with create_defs_folder_sandbox() as sandbox, dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
            for made, text in ((StreamsComponent, EXAMPLE), (dg.PythonScriptComponent, DOWNSTREAM)):
                sandbox.scaffold_component(component_cls=made, defs_yaml_contents=yaml.safe_load(text))
            with sandbox.build_all_defs() as definitions:
                stream = dg.AssetKey(["shop", "hourly_orders"])
                job = definitions.resolve_job_def("hourly_orders_stream")
                instance.create_run_for_job(
                    job, status=dg.DagsterRunStatus.STARTED, asset_selection=frozenset({stream})
                )
                # The first thing that the step does.
                plan_outside_runs(instance, [stream])
                before = dg.evaluate_automation_conditions(definitions, instance)
                instance.report_runless_asset_event(dg.AssetMaterialization(stream, tags={"dagster/data_version": "7"}))
                after = dg.evaluate_automation_conditions(definitions, instance, cursor=before.cursor)

        assert (before.total_requested, after.total_requested) == (0, 1)
        assert after.get_num_requested(dg.AssetKey(["shop", "revenue"])) == 1


class TestMistakes:
    """Each is told with the field where it is, and with what to do."""

    @pytest.mark.parametrize(
        ("job", "told"),
        [
            ({"checkpointing": {"intervall": 5}}, ["checkpointing", "intervall"]),
            ({"checkpointing": {"interval": 9}}, ["checkpointing", "interval", "9"]),
            ({"checkpointing": {"cleanup": "KEEP"}}, ["checkpointing", "cleanup", "KEEP", "RETAIN_ON_CANCELLATION"]),
            ({"restart_strategy": {"kind": "SOMETIMES"}}, ["restart_strategy", "kind", "FIXED_DELAY"]),
            ({"restart_strategy": {"kind": "FIXED_DELAY", "attempts": -1}}, ["restart_attempts is -1"]),
            ({"sources": []}, ["0 sources"]),
            ({"sources": [{"name": "a"}]}, ["sources", "it has nothing to read", "table"]),
            ({"sources": [{"name": "a b", "format": "rate"}]}, ["sources", "'a b'", "letters"]),
            (
                {"sources": [{"name": "a", "format": "rate"}, {"name": "b", "format": "rate"}]},
                ["2 sources", "transform"],
            ),
            ({"transform": {"sql": "SELECT 1", "function": "a:b"}}, ["transform", "either sql or function"]),
            ({"transform": {"function": "nowhere.at_all:f"}}, ["transform.function", "nowhere.at_all:f"]),
            ({"transform": {"function": f"{__name__}:nothing"}}, ["transform.function", "nothing"]),
            ({"sink": {}}, ["sink", "it has no place to write to"]),
            ({"sink": {"foreach_batch": "a:b", "path": "/a"}}, ["sink", "Remove format, path and table"]),
            ({"sink": {"table": "a.b", "path": "/a"}}, ["sink", "Remove path, or table"]),
            ({"sink": {"path": "/a", "options": {"checkpointLocation": "/c"}}}, ["sink", "checkpointLocation"]),
            ({"sink": {"format": "console", "output_mode": "upsert"}}, ["output_mode", "complete"]),
            ({"trigger": {}}, ["trigger", "give one of"]),
            ({"freshness": {"fail_after_ms": 5}}, ["freshness", "60000"]),
            ({"health": {"max_age": 5}}, ["health", "max_age"]),
            ({"health": {"failures_to_warn": 4}}, ["health", "failures_to_fail is 3"]),
            ({"stream_id": "../up"}, ["stream_id", "cannot name a folder"]),
            ({"assets": [{"key": "a", "partitions_def": {"type": "static", "partition_keys": ["x"]}}]}, ["partitions"]),
            ({"sink": None}, ["sink", "required"]),
        ],
    )
    def test_a_stream_that_cannot_be(self, job: dict[str, Any], told: list[str]) -> None:
        with pytest.raises((ValueError, CkptError, ResolutionException)) as raised:
            stream_of(**job)

        for words in told:
            assert words in str(raised.value)

    @pytest.mark.parametrize(
        ("attributes", "told"),
        [
            ({"resources": {"checkpoint_storage": {}}}, "path"),
            ({"resources": {"checkpoint_storage": {"path": "s3://b/c", "max_state_size": 5}}}, "max_state_size"),
            ({"resources": {"state_backend": {"kind": "HASHMAP"}}}, "live_directory"),
            ({"resources": {"checkpoint_catalog": {"link": "x"}}}, "link"),
            ({"declared_in_python": ["json:dumps"]}, "not a stream"),
        ],
    )
    def test_surroundings_that_cannot_be(self, attributes: dict[str, Any], told: str) -> None:
        with pytest.raises((ValueError, CkptError, ResolutionException), match=told):
            component(**attributes).all_streams()


@pytest.mark.spark
class TestQueries:
    """What the YAML says reaches Spark; nothing is started."""

    @pytest.mark.parametrize(
        ("transform", "columns"),
        [
            (None, ["timestamp", "value"]),
            ({"sql": "SELECT value % 2 AS odd FROM rates"}, ["odd"]),
            ({"function": f"{__name__}:doubled"}, ["value"]),
        ],
    )
    def test_a_transformation_is_sql_or_a_function_or_none(
        self, spark: SparkSession, transform: dict[str, str] | None, columns: list[str]
    ) -> None:
        [declared] = component(streams=[a_stream(transform=transform)]).streams

        assert described(declared, spark)._df.columns == columns

    def test_several_sources_are_given_in_their_order(self, spark: SparkSession) -> None:
        sources = [{"name": name, "format": "rate", "options": {"rowsPerSecond": 1}} for name in ("left", "right")]
        transform = {"function": f"{__name__}:doubled"}
        [declared] = component(streams=[a_stream(sources=sources, transform=transform)]).streams

        assert described(declared, spark)._df.columns == ["timestamp", "value"]

    @pytest.mark.parametrize(
        "trigger", [{"processing_time": "10 seconds"}, {"available_now": True}, {"continuous": "1 second"}]
    )
    def test_every_trigger_and_a_function_for_each_batch(self, spark: SparkSession, trigger: dict[str, Any]) -> None:
        sink = {"foreach_batch": f"{__name__}:keep", "output_mode": "update"}
        watermark = {"column": "timestamp", "delay": "1 minute"}
        sources = [{"name": "rates", "format": "rate", "watermark": watermark}]
        [declared] = component(streams=[a_stream(sources=sources, sink=sink, trigger=trigger)]).streams

        assert described(declared, spark) is not None


def described(declared: Any, spark: SparkSession) -> Any:
    from dagster_ckpt.orchestration.yaml_stream import described

    return described(declared.name, declared.sources, declared.transform, declared.sink, declared.trigger)(spark)


class TestDg:
    def test_what_is_scaffolded_can_be_loaded_as_it_is(self) -> None:
        with create_defs_folder_sandbox() as sandbox:
            params: dict[str, str] = {"stream": "clicks", "data_directory": "/data"}
            path = sandbox.scaffold_component(component_cls=StreamsComponent, scaffold_params=params)
            with sandbox.load_component_and_build_defs(defs_path=path) as (_, definitions):
                dg.Definitions.validate_loadable(definitions)
                assert definitions.resolve_job_def("clicks_stream")

    def test_what_is_scaffolded_is_named_by_its_folder_and_keeps_its_data_in_the_project(self) -> None:
        with create_defs_folder_sandbox() as sandbox:
            path = sandbox.scaffold_component(component_cls=StreamsComponent, defs_path="web-clicks")
            written = yaml.safe_load((path / "defs.yaml").read_text(encoding="utf-8"))["attributes"]
            [stream] = written["streams"]
            assert stream["name"] == "web_clicks"
            assert stream["sink"]["path"].endswith("/data/output/web_clicks")
            assert not stream["sink"]["path"].startswith("/tmp/streams")

    def test_a_second_one_is_scaffolded_with_names_of_its_own(self) -> None:
        with create_defs_folder_sandbox() as sandbox:
            for prefix in ("eu", "us"):
                params = {"stream": f"{prefix}_clicks", "data_directory": f"/data/{prefix}", "name_prefix": prefix}
                sandbox.scaffold_component(component_cls=StreamsComponent, scaffold_params=params)
            with sandbox.build_all_defs() as definitions:
                dg.Definitions.validate_loadable(definitions)
                assert definitions.resolve_job_def("us_cancel_stream_job")

    def test_the_package_registers_itself_with_its_version(self) -> None:
        from dagster_ckpt import __version__

        assert DagsterLibraryRegistry.get()["dagster-ckpt"] == __version__

    def test_the_entry_point_leads_to_the_component(self) -> None:
        import tomllib

        from dagster.components.core.package_entry import get_package_objects_in_module

        project = tomllib.loads((PAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
        [module] = project["project"]["entry-points"]["dagster_dg_cli.registry_modules"].values()

        assert dict(get_package_objects_in_module(sys.modules[module])) == {"StreamsComponent": StreamsComponent}
