"""What somebody expects of a stream who knows `@dg.asset`: it works, or the definition says why not."""

from __future__ import annotations

import inspect
from datetime import timedelta
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import dagster as dg
import pytest
from dagster._core.definitions.metadata.source_code import CodeReferencesMetadataSet
from orchestration_catalog import begin_execution, register
from pydantic import Field

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.client.launching import DriverLaunch
from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.external_asset import external_streaming_asset
from dagster_ckpt.orchestration.resources import CheckpointCatalogResource
from dagster_ckpt.orchestration.run_status import RESTART_OF_TAG
from dagster_ckpt.orchestration.settings import CONFIG_TAG, StreamRunConfig, config_of_run
from dagster_ckpt.orchestration.stream import StreamingAsset, StreamSpec
from dagster_ckpt.orchestration.streaming_asset import declare_stream, streaming_asset, streaming_multi_asset
from dagster_ckpt.orchestration.translator import RESOURCES, StreamTranslator
from dagster_ckpt.orchestration.yaml_stream import StreamDeclaration
from dagster_ckpt.values.modes import DesiredState


class Speed(Enum):
    SLOW = "slow"
    FAST = "fast"


class Limits(dg.Config):
    rows: int = 10
    speed: Speed = Speed.SLOW


class Access(dg.Config):
    api_key: str = "none"
    default_key: str = dg.EnvVar("DEFAULT_KEY")
    limits: Limits = Limits()
    labels: dict[str, str] = Field(default={})


@streaming_asset()
def limited(context: Any, config: Limits, pyspark: Any) -> Any:
    return (config.rows, config.speed)


@dg.failure_hook
def page_somebody(context: dg.HookContext) -> None: ...


def built(*streams: Any) -> dg.Definitions:
    resources = dict.fromkeys(RESOURCES, dg.ResourceDefinition.none_resource())
    return dg.Definitions.merge(stream_definitions(*streams), dg.Definitions(resources=resources))


class TestConfig:
    def test_its_fields_are_in_the_launchpad_beside_those_of_every_start(self) -> None:
        job = built(limited).resolve_job_def("limited_stream")
        given = {"rows": 3, "speed": "FAST", "start_from": "empty"}

        assert dg.validate_run_config(job, {"ops": {"limited": {"config": given}}})
        assert limited.asset.op.required_resource_keys == set(RESOURCES)

    def test_a_context_without_a_run_has_the_defaults_or_what_it_was_built_with(self) -> None:
        resources = SimpleNamespace(pyspark=None)
        assert limited.describe is not None
        with dg.build_asset_context() as context:
            assert limited.describe(context, resources) == (10, Speed.SLOW)
        with dg.build_asset_context(asset_config={"rows": 3}) as context:
            assert limited.describe(context, resources) == (3, Speed.SLOW)
        assert limited(None, Limits(rows=4), None) == (4, Speed.SLOW)

    def test_a_restart_by_the_supervisor_has_the_config_of_the_run_before(
        self, catalog: Catalog, catalog_resource: CheckpointCatalogResource, instance: dg.DagsterInstance
    ) -> None:
        register(catalog, "limited")
        found: list[Any] = []

        @dg.op(config_schema={**StreamRunConfig.to_fields_dict(), **Limits.to_fields_dict()})
        def body(context):  # type: ignore[no-untyped-def]
            found.append(config_of_run(context, Limits, "limited", catalog_resource))

        @dg.job
        def job() -> None:
            body()

        def run(config: dict[str, Any], **tags: str) -> dg.DagsterRun:
            done = job.execute_in_process({"ops": {"body": {"config": config}}}, instance=instance, tags=tags)
            begin_execution(catalog, "limited", done.run_id)
            run = instance.get_run_by_id(done.run_id)
            assert run is not None
            return run

        run({"rows": 3, "speed": "FAST", "start_from": "empty"})
        restarted = run({}, **{RESTART_OF_TAG: "before"})
        run({}, **{RESTART_OF_TAG: "before"})
        run({})

        assert [(each.rows, each.speed) for each in found] == [
            (3, Speed.FAST),
            (3, Speed.FAST),
            (3, Speed.FAST),
            (10, Speed.SLOW),
        ]
        assert "start_from" not in restarted.tags[CONFIG_TAG]

    @pytest.mark.parametrize("is_of_the_job", [False, True])
    def test_a_secret_is_recorded_as_the_name_of_its_variable_which_a_restart_reads_again(
        self,
        catalog: Catalog,
        catalog_resource: CheckpointCatalogResource,
        instance: dg.DagsterInstance,
        monkeypatch: pytest.MonkeyPatch,
        is_of_the_job: bool,
    ) -> None:
        register(catalog, "limited")
        given = {"api_key": {"env": "API_KEY"}, "limits": {"rows": 3}, "labels": {"env": "production"}}
        config = {"ops": {"body": {"config": given}}}
        found: list[Any] = []

        @dg.op(config_schema={**StreamRunConfig.to_fields_dict(), **Access.to_fields_dict()})
        def body(context):  # type: ignore[no-untyped-def]
            found.append(config_of_run(context, Access, "limited", catalog_resource))

        @dg.job(config=config if is_of_the_job else None)
        def job() -> None:
            body()

        def run(config: dict[str, Any], recorded: str | None = None, **tags: str) -> str:
            done = job.execute_in_process(config, instance=instance, tags=tags, raise_on_error=False)
            assert done.success, done.all_events
            begin_execution(catalog, "limited", done.run_id)
            if recorded is not None:
                instance.add_run_tags(done.run_id, {CONFIG_TAG: recorded})
            run = instance.get_run_by_id(done.run_id)
            assert run is not None
            return run.tags[CONFIG_TAG]

        monkeypatch.setenv("API_KEY", "first")
        monkeypatch.setenv("DEFAULT_KEY", "of-default")
        tags = [run({} if is_of_the_job else config)]
        monkeypatch.setenv("API_KEY", "rotated")
        tags += [run({}, **{RESTART_OF_TAG: "before"}) for _ in range(2)]

        assert [each.api_key for each in found] == ["first", "rotated", "rotated"]
        for each in found:
            assert (each.limits, each.labels) == (Limits(rows=3), {"env": "production"})
            assert each.default_key == "of-default"
        assert not any(secret in tag for tag in tags for secret in ("first", "rotated", "of-default"))
        assert len(set(tags)) == 1

        # As earlier versions recorded it.
        run({}, recorded='{"api_key": "plain", "limits": {"rows": 4, "speed": "fast"}}')
        run({}, **{RESTART_OF_TAG: "before"})
        assert (found[-1].api_key, found[-1].limits) == ("plain", Limits(rows=4, speed=Speed.FAST))

    def test_a_restart_without_the_variable_says_which_field_needs_it(
        self,
        catalog: Catalog,
        catalog_resource: CheckpointCatalogResource,
        instance: dg.DagsterInstance,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        register(catalog, "limited")
        monkeypatch.setenv("DEFAULT_KEY", "of-default")

        @dg.op(config_schema={**StreamRunConfig.to_fields_dict(), **Access.to_fields_dict()})
        def body(context):  # type: ignore[no-untyped-def]
            config_of_run(context, Access, "limited", catalog_resource)

        @dg.job
        def job() -> None:
            body()

        done = job.execute_in_process(instance=instance)
        begin_execution(catalog, "limited", done.run_id)
        instance.add_run_tags(done.run_id, {CONFIG_TAG: '{"api_key": {"env": "API_KEY"}}'})
        with pytest.raises(OptionError, match=r"field api_key of Access, .* variable that is not set"):
            job.execute_in_process(instance=instance, tags={RESTART_OF_TAG: "before"})

    def test_a_field_that_a_run_of_the_supervisor_cannot_fill_is_refused(self) -> None:
        class Required(dg.Config):
            rows: int

        class Taken(dg.Config):
            start_from: str = "x"

        def stream(context: Any, config: Any) -> Any: ...

        for kind, message in ((Required, "field rows of Required has no default"), (Taken, "has the field start_from")):
            stream.__annotations__["config"] = kind
            with pytest.raises(OptionError, match=message):
                streaming_asset()(stream)
        stream.__annotations__.clear()
        with pytest.raises(OptionError, match=r"no annotation that is a subclass of dagster\.Config"):
            streaming_asset()(stream)

    def test_a_resource_may_be_called_config(self) -> None:
        class Settings(dg.ConfigurableResource):  # type: ignore[type-arg]
            rows: int = 1

        def stream(context: Any, config: Any) -> Any: ...

        stream.__annotations__["config"] = Settings
        assert "config" in streaming_asset()(stream).asset.op.required_resource_keys


class TestTagsAndHooks:
    TAGS: ClassVar[dict[str, Any]] = {
        "dagster/priority": "5",
        "dagster-k8s/config": {"container_config": {"resources": {"limits": {"cpu": "4"}}}},
    }

    def of_each_maker(self, **options: Any) -> list[StreamingAsset]:
        @streaming_asset(**options)
        def one(context: Any) -> Any: ...

        @streaming_multi_asset(specs=[dg.AssetSpec("a"), dg.AssetSpec("b")], **options)
        def several(context: Any) -> Any: ...

        launch = DriverLaunch(("false",), log_directory="/tmp")
        return [one, several, external_streaming_asset("outside", launch=launch, **options)]

    def test_tags_are_those_of_the_op_and_of_the_runs(self) -> None:
        streams = self.of_each_maker(op_tags=self.TAGS, hooks=[page_somebody])
        definitions = built(*streams)

        for stream in streams:
            job = definitions.resolve_job_def(stream.start_job.name)
            for tags in (job.run_tags, stream.asset.op.tags):
                assert tags["dagster/priority"] == "5"
                assert "container_config" in tags["dagster-k8s/config"]
                assert tags["dagster/max_retries"] == "0"
            assert job.hook_defs == {page_somebody}

    @pytest.mark.parametrize("name", ["dagster/max_runtime", "dagster/max_retries", "dagster_ckpt/stream_id"])
    def test_tags_that_streams_set_are_refused(self, name: str) -> None:
        with pytest.raises(OptionError, match=f"has {name}, which is set for every stream"):

            @streaming_asset(op_tags={name: "1"})
            def orders(context: Any) -> Any: ...

    def test_in_yaml(self) -> None:
        declared = StreamDeclaration.resolve_from_dict(
            {
                "name": "orders",
                "sources": [{"name": "rates", "format": "rate"}],
                "sink": {"format": "noop"},
                "op_tags": self.TAGS,
                "hooks": [f"{__name__}:page_somebody"],
            }
        )
        stream = declared.stream()
        assert stream.spec.op_tags == self.TAGS
        assert {each.name for each in stream.spec.hooks} == {"page_somebody"}

    def test_a_job_of_the_users_own_has_its_own(self) -> None:
        @dg.op(config_schema=StreamRunConfig.to_fields_dict())
        def mine(context):  # type: ignore[no-untyped-def]
            ...

        @dg.job
        def my_job() -> None:
            mine()

        with pytest.raises(OptionError, match="give my_job the tags and hooks itself"):
            declare_stream(StreamSpec.of("mine", op_tags={"team": "sales"}), my_job)

    def test_without_a_launch_there_is_no_run_for_them(self) -> None:
        for option in ({"op_tags": {"team": "sales"}}, {"desired_state": DesiredState.RUNNING}):
            with pytest.raises(OptionError, match="without launch no run of Dagster starts the driver"):
                external_streaming_asset("outside", **option)  # type: ignore[arg-type]


def test_an_external_stream_has_the_options_of_every_asset() -> None:
    policy = dg.FreshnessPolicy.time_window(fail_window=timedelta(hours=1))
    launch = DriverLaunch(("false",), log_directory="/tmp")
    outside = external_streaming_asset(
        "outside", launch=launch, kinds={"delta"}, pool="drivers", freshness_policy=policy
    )
    [spec] = outside.asset.specs
    assert (spec.kinds, spec.freshness_policy, outside.asset.op.pool) == ({"delta"}, policy, "drivers")


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("partitions_def", "Define one stream for each region or tenant"),
        ("retry_policy", "Use restart_strategy"),
        ("check_specs", "Define an asset_check of its own"),
        ("config_schema", "a parameter config"),
        ("io_manager_key", "The query writes its output"),
        ("run_tags", "Use op_tags"),
    ],
)
def test_a_parameter_that_a_stream_cannot_have_is_refused_with_the_reason(option: str, why: str) -> None:
    with pytest.raises(TypeError, match=f"'{option}'.*{why}"):
        streaming_asset(**{option: None})


UNFIT = {
    "automation_condition": dg.AutomationCondition.eager(),
    "partitions_def": dg.DailyPartitionsDefinition("2026-01-01"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_translator_cannot_have_the_asset_launched_or_partitioned(name: str) -> None:
    class Wrong(StreamTranslator):
        def get_asset_spec(self, spec: dg.AssetSpec) -> dg.AssetSpec:
            return spec.replace_attributes(**{name: UNFIT[name]})

    with pytest.raises(OptionError, match=f"has {name}, which a streaming asset cannot have"):
        streaming_asset(translator=Wrong())(limited.function)
    with pytest.raises(OptionError, match=f"has {name}"):
        external_streaming_asset("outside", translator=Wrong())


def test_nor_can_what_changes_the_specs_later(orders: StreamingAsset) -> None:
    eager = built(orders).map_asset_specs(
        func=lambda spec: spec.replace_attributes(automation_condition=dg.AutomationCondition.eager())
    )

    with pytest.raises(dg.DagsterInvalidDefinitionError) as raised:
        dg.Definitions.validate_loadable(eager)
    assert isinstance(raised.value.__cause__, OptionError)
    assert "asset orders has automation_condition, which a streaming asset cannot have" in str(raised.value.__cause__)
    harmless = built(orders).map_asset_specs(func=lambda spec: spec.merge_attributes(tags={"team": "sales"}))
    dg.Definitions.validate_loadable(harmless)


def test_code_references_name_the_users_function() -> None:
    [asset] = dg.with_source_code_references([limited.asset])
    [spec] = asset.specs
    references = CodeReferencesMetadataSet.extract(spec.metadata).code_references
    assert references is not None
    [reference] = references.code_references
    assert limited.function is not None
    assert reference.file_path == str(Path(__file__))
    assert reference.line_number == inspect.getsourcelines(limited.function)[1]


def test_a_traceback_names_no_line_of_the_user_that_the_error_has_not_passed() -> None:
    assert limited.function is not None
    _, first = inspect.getsourcelines(limited.function)
    code = limited.asset.op.compute_fn.decorated_fn.__code__  # type: ignore[union-attr]
    assert {line for _, _, line in code.co_lines()} == {first}
    assert code.co_name == "limited"


def test_a_streaming_asset_needs_no_parentheses() -> None:
    @streaming_asset
    def bare(context: Any) -> Any: ...

    assert (bare.stream_id, bare.key.path) == ("bare", ["bare"])


def test_where_dagster_takes_no_stream_its_error_says_what_to_write(orders: StreamingAsset) -> None:
    for wrong in (lambda: dg.AssetSpec("daily", deps=[orders]), lambda: dg.Definitions(assets=[orders])):
        with pytest.raises(Exception, match=r"<StreamingAsset orders: write \.asset or \.key in deps") as raised:
            wrong()
        assert len(str(raised.value)) < 1_000

    @streaming_asset(deps=[orders])
    def late_orders(context: Any) -> Any: ...

    assert {dep.asset_key for spec in late_orders.asset.specs for dep in spec.deps} == {orders.key}
