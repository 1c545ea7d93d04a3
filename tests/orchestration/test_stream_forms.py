"""A stream in every form that Dagster has for it: one asset, several, an asset or an op that people write themselves.

All of them run through one path, so a form is tested for what it adds: its definitions, and that it gets there.
"""

import inspect
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus
from orchestration_catalog import register, take_snapshot

from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.errors import OptionError, StreamNotFoundError
from dagster_ckpt.orchestration import stream_run
from dagster_ckpt.orchestration.catalog_sensor import build_catalog_sensor
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.settings import StreamRunConfig
from dagster_ckpt.orchestration.stream import Stream, StreamingAsset, StreamSpec, find_stream, stream_handle
from dagster_ckpt.orchestration.streaming_asset import (
    StreamResource,
    declare_stream,
    streaming_asset,
    streaming_multi_asset,
)
from dagster_ckpt.recovery.checkpoint_retention import RetentionReport
from dagster_ckpt.runtime import execution_end
from dagster_ckpt.runtime.run_request import EndKind, Outcome, QueryEnd, RunRequest
from dagster_ckpt.stream.handle import StreamHandle

SPEC = StreamSpec.of("orders", checkpointing=CheckpointConfig(interval=1000))
GOOD, BAD = dg.AssetKey(["shop", "good"]), dg.AssetKey(["shop", "bad"])
SPECS = [dg.AssetSpec(GOOD, code_version="7"), dg.AssetSpec(BAD, code_version="7", kinds={"delta"})]


def in_one_asset() -> StreamingAsset:
    @streaming_asset(name="orders", code_version="7", checkpointing=CheckpointConfig(interval=1000))
    def orders(context: Any) -> Any: ...

    return orders


def in_several_assets() -> StreamingAsset:
    @streaming_multi_asset(specs=SPECS, checkpointing=CheckpointConfig(interval=1000))
    def orders(context: Any) -> Any: ...

    return orders


def in_an_asset_of_ones_own() -> StreamingAsset:
    @dg.asset(output_required=False, code_version="7")
    def orders(context: dg.AssetExecutionContext, config: StreamRunConfig, streams: StreamResource) -> Iterator[Any]:
        outcome = yield from streams.run(context, SPEC, describe=lambda spark: spark)
        context.log.info(f"ended as {outcome.end.kind.name}")

    return declare_stream(SPEC, orders)


def in_several_assets_of_ones_own() -> StreamingAsset:
    @dg.multi_asset(name="orders", specs=[spec.replace_attributes(skippable=True) for spec in SPECS])
    def orders(context: dg.AssetExecutionContext, config: StreamRunConfig, streams: StreamResource) -> Iterator[Any]:
        yield from streams.run(context, SPEC, describe=lambda spark: spark)

    return declare_stream(SPEC, orders)


def in_an_op() -> Stream:
    @dg.op(out=dg.Out(is_required=False))
    def orders(context: dg.OpExecutionContext, config: StreamRunConfig, streams: StreamResource) -> Iterator[Any]:
        yield from streams.run(context, SPEC, describe=lambda spark: spark)

    @dg.job(name="orders_stream", tags={"dagster/max_retries": "0"})
    def orders_stream() -> None:
        orders()

    return declare_stream(SPEC, orders_stream)


FORMS: list[Callable[[], Stream]] = [
    in_one_asset,
    in_several_assets,
    in_an_asset_of_ones_own,
    in_several_assets_of_ones_own,
    in_an_op,
]
WRITES = {
    in_several_assets: (GOOD, BAD),
    in_several_assets_of_ones_own: (GOOD, BAD),
    in_an_op: (),
}


@pytest.fixture
def resources(tmp_path: Path, catalog_resource: CheckpointCatalogResource) -> dict[str, Any]:
    parts = {
        "pyspark": dg.ResourceDefinition.hardcoded_resource(Session()),
        "checkpoint_storage": CheckpointStorageResource(path=f"file://{tmp_path}/checkpoints"),
        "state_backend": StateBackendResource(live_directory=f"{tmp_path}/live"),
        "checkpoint_catalog": catalog_resource,
    }
    return {**parts, "streams": StreamResource(**parts)}


class Session:
    """Stands where the `pyspark` resource is."""

    spark_session = None


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[StreamHandle, RunRequest]]:
    """What the lifecycle was asked to run; every stream ends by itself at once."""
    asked: list[tuple[StreamHandle, RunRequest]] = []

    def execute_stream(job: StreamHandle, request: RunRequest) -> Outcome:
        asked.append((job, request))
        return Outcome(QueryEnd(EndKind.ENDED_BY_ITSELF, "as the test says"), "the execution")

    monkeypatch.setattr(stream_run, "execute_stream", execute_stream)
    monkeypatch.setattr(stream_run, "apply_state_backend", lambda _spark, _backend: None)
    monkeypatch.setattr(stream_run, "jvm_pid", lambda _spark: None)
    monkeypatch.setattr(execution_end, "apply_terminal_retention", lambda *_: RetentionReport())
    return asked


def start(
    stream: Stream, resources: dict[str, Any], instance: dg.DagsterInstance, config: dict[str, Any] | None = None
) -> tuple[DagsterRunStatus, str]:
    """Run its start job; returns how that ended, and what the failure says."""
    definitions = dg.Definitions.merge(stream_definitions(stream), dg.Definitions(resources=resources))
    job = definitions.resolve_job_def("orders_stream")
    result = job.execute_in_process(
        {"ops": {stream.name: {"config": config or {}}}}, instance=instance, raise_on_error=False
    )
    run = instance.get_run_by_id(result.run_id)
    assert run is not None
    failures = [event.step_failure_data for event in result.all_events if event.is_step_failure]
    return run.status, failures[0].user_failure_data.description if failures else ""


@pytest.mark.parametrize("form", FORMS)
def test_every_form_runs_the_same_job_and_is_told_where_to_start(
    form: Callable[[], Stream], resources: dict[str, Any], instance: dg.DagsterInstance, ran: list[Any]
) -> None:
    stream = form()

    assert start(stream, resources, instance, {"start_from": "chk-7"}) == (DagsterRunStatus.SUCCESS, "")

    [(job, request)] = ran
    assert (job.stream_id, job.name) == ("orders", "orders")
    assert job.options == CheckpointConfig(interval=1000).options
    assert "chk-7" in str(request.start_from)


@pytest.mark.parametrize("form", FORMS)
def test_operators_see_the_job_as_its_run_does(
    form: Callable[[], Stream], resources: dict[str, Any], instance: dg.DagsterInstance, ran: list[Any]
) -> None:
    stream = form()
    start(stream, resources, instance)

    seen = stream_handle(stream, Bundle(resources))

    [(job, _)] = ran
    told = ("stream_id", "name", "asset_key", "options", "restart", "code_version", "live_root")
    assert [getattr(seen, each) for each in told] == [getattr(job, each) for each in told]


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_is_found_by_its_job_id_and_by_the_key_of_each_asset(form: Callable[[], Stream]) -> None:
    stream = form()

    assert stream.keys == WRITES.get(form, (dg.AssetKey("orders"),))
    for name in ["orders", *(key.to_user_string() for key in stream.keys)]:
        assert find_stream([stream], name) is stream
    with pytest.raises(StreamNotFoundError, match="'shop/ugly'"):
        find_stream([stream], "shop/ugly")


@pytest.mark.parametrize("form", FORMS)
def test_a_completed_snapshot_is_reported_once_on_every_asset(
    form: Callable[[], Stream], instance: dg.DagsterInstance, catalog_resource: CheckpointCatalogResource
) -> None:
    stream = form()
    catalog = catalog_resource.catalog()
    register(catalog, "orders")
    snapshot = take_snapshot(catalog, "orders")
    context = dg.build_sensor_context(instance, resources={"checkpoint_catalog": catalog_resource})
    sensor = build_catalog_sensor([stream])

    first = sensor.evaluate_tick(context).asset_events
    for event in first[:1]:
        instance.report_runless_asset_event(event)
    rest = sensor.evaluate_tick(context).asset_events
    catalog.close()

    assert [event.asset_key for event in first] == list(stream.keys)
    assert {event.metadata["dagster_ckpt/snapshot_id"].value for event in first} <= {snapshot.snapshot_id}
    assert [event.asset_key for event in rest] == list(stream.keys[1:]), "a tick that was cut off loses no asset"


class TestSeveralAssets:
    def test_a_spec_keeps_what_it_says_and_gets_what_it_does_not(self) -> None:
        good, bad = in_several_assets().asset.specs

        assert (good.kinds, bad.kinds) == ({"spark", "streaming"}, {"delta"})
        assert good.metadata["dagster_ckpt/stream_id"] == bad.metadata["dagster_ckpt/stream_id"] == "orders"
        assert good.skippable
        assert bad.skippable

    def test_one_code_version_for_all_of_them(self) -> None:
        @streaming_multi_asset(specs=SPECS, code_version="8")
        def orders(context: Any) -> Any: ...

        assert orders.code_version == "8"
        assert set(orders.asset.code_versions_by_key.values()) == {"8"}

    @pytest.mark.parametrize(
        ("specs", "complaint"),
        [
            ([], "specs is empty"),
            ([SPECS[0], dg.AssetSpec("other", code_version="8")], r"code versions \['7', '8'\]"),
            ([dg.AssetSpec("a", automation_condition=dg.AutomationCondition.eager())], "a has automation_condition"),
            ([dg.AssetSpec("a", partitions_def=dg.StaticPartitionsDefinition(["x"]))], "a has partitions_def"),
        ],
    )
    def test_what_one_query_cannot_be_is_refused(self, specs: list[dg.AssetSpec], complaint: str) -> None:
        with pytest.raises(OptionError, match=complaint):

            @streaming_multi_asset(specs=specs)
            def orders(context: Any) -> Any: ...


def test_one_asset_may_say_all_that_the_page_shows() -> None:
    policy = dg.FreshnessPolicy.time_window(fail_window=timedelta(minutes=10))

    @streaming_asset(kinds={"kafka"}, freshness_policy=policy, owners=["team:shop"], pool="spark", code_version="3")
    def orders(context: Any) -> Any: ...

    [spec] = orders.asset.specs
    assert (spec.kinds, spec.freshness_policy, spec.owners) == ({"kafka"}, policy, ["team:shop"])
    assert orders.asset.op.pool == "spark"
    assert orders.code_version == "3"


class TestAssetsOfOnesOwn:
    @pytest.mark.parametrize("policy", [{"retry_policy": dg.RetryPolicy(max_retries=1)}, {}])
    def test_what_would_start_a_second_writer_or_none_is_refused_when_it_is_declared(
        self, policy: dict[str, Any]
    ) -> None:
        @dg.asset(output_required=False, **policy)
        def orders(context: dg.AssetExecutionContext, streams: StreamResource) -> None: ...

        with pytest.raises(OptionError, match="RetryPolicy" if policy else "config: StreamRunConfig"):
            declare_stream(SPEC, orders)

    def test_fields_of_ones_own_may_be_beside_those_of_a_start(
        self, resources: dict[str, Any], instance: dg.DagsterInstance, ran: list[Any]
    ) -> None:
        class ShopConfig(StreamRunConfig):
            shop: str = "north"

        @dg.asset(output_required=False)
        def orders(context: dg.AssetExecutionContext, config: ShopConfig, streams: StreamResource) -> Iterator[Any]:
            assert config.shop == "south"
            yield from streams.run(context, SPEC, describe=lambda spark: spark)

        config = {"shop": "south", "start_from": "chk-7", "claim_mode": "CLAIM", "checkpointing": {"interval": 50}}
        assert start(declare_stream(SPEC, orders), resources, instance, config)[0] is DagsterRunStatus.SUCCESS

        [(job, request)] = ran
        assert job.options.interval == 50
        assert request.start_from.claim_mode.name == "CLAIM"

    def test_a_required_output_is_refused_before_anything_starts(
        self, resources: dict[str, Any], instance: dg.DagsterInstance, ran: list[Any]
    ) -> None:
        @dg.asset
        def orders(
            context: dg.AssetExecutionContext, config: StreamRunConfig, streams: StreamResource
        ) -> Iterator[Any]:
            yield from streams.run(context, SPEC, describe=lambda spark: spark)

        status, failure = start(declare_stream(SPEC, orders), resources, instance)

        assert status is DagsterRunStatus.FAILURE
        assert "output_required=False" in failure
        assert ran == []

    def test_of_several_ops_one_is_named(self) -> None:
        @dg.op
        def orders(config: StreamRunConfig) -> None: ...

        @dg.op
        def before() -> None: ...

        @dg.job
        def both() -> None:
            before()
            orders()

        with pytest.raises(OptionError, match=r"\['before', 'orders'\], and none is None"):
            declare_stream(SPEC, both)
        assert declare_stream(SPEC, both, op="orders").name == "orders"


class TestNothingElseStartsAStreamAgain:
    """A retry of Dagster's own would be a second writer, so such a run is refused before anything starts."""

    @pytest.mark.parametrize("form", FORMS)
    def test_a_retry_policy_of_the_job_is_refused(
        self, form: Callable[[], Stream], resources: dict[str, Any], instance: dg.DagsterInstance, ran: list[Any]
    ) -> None:
        stream = form()
        if isinstance(stream, StreamingAsset):
            job = dg.define_asset_job("mine", [stream.asset], op_retry_policy=dg.RetryPolicy())
            definitions = dg.Definitions([stream.asset], jobs=[job], resources=resources)
            resolved = definitions.resolve_job_def("mine")
        else:
            assert isinstance(stream.start_job, dg.JobDefinition)
            resolved = stream.start_job.graph.to_job(op_retry_policy=dg.RetryPolicy(), resource_defs=resources)

        result = resolved.execute_in_process(instance=instance, raise_on_error=False)

        [failure] = [event.step_failure_data for event in result.all_events if event.is_step_failure]
        assert "RetryPolicy" in failure.user_failure_data.description
        assert ran == []

    @pytest.mark.parametrize(
        ("settings", "tags", "refused"),
        [
            ({}, {}, False),
            ({}, {"dagster/max_retries": "2"}, True),
            ({"enabled": True, "max_retries": 3}, {}, True),
            ({"enabled": True, "max_retries": 3}, {"dagster/max_retries": "0"}, False),
        ],
    )
    def test_a_run_that_dagster_would_retry_is_refused(
        self, settings: dict[str, Any], tags: dict[str, str], refused: bool, resources: dict[str, Any], ran: list[Any]
    ) -> None:
        asset = in_an_asset_of_ones_own().asset
        with dg.DagsterInstance.ephemeral(settings={"run_retries": settings}) as instance:
            result = dg.materialize([asset], resources=resources, instance=instance, raise_on_error=False, tags=tags)

        failures = [event.step_failure_data for event in result.all_events if event.is_step_failure]
        assert [job.stream_id for job, _ in ran] == ([] if refused else ["orders"])
        if refused:
            assert 'dagster/max_retries: "0"' in failures[0].user_failure_data.description


def test_every_form_is_documented_with_an_example() -> None:
    for public in (streaming_asset, streaming_multi_asset, StreamResource):
        assert "Example:" in (inspect.getdoc(public) or "")


class Bundle:
    """Resources by attribute, as Dagster hands them to an op."""

    def __init__(self, resources: dict[str, Any]) -> None:
        self.__dict__.update(resources)
