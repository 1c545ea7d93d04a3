"""The supervisor sensor and streams that share a Dagster run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import dagster as dg
import pytest
from dagster import DagsterRunStatus
from orchestration_catalog import HOST, begin_execution
from supervised_streams import DELAY_MS, Supervised

from dagster_ckpt.catalog.records import (
    ExecutionStatus,
    RequestKind,
)
from dagster_ckpt.catalog.tables import leases
from dagster_ckpt.orchestration.run_status import (
    STREAM_ID_TAG,
    report_canceling,
)
from dagster_ckpt.orchestration.stream import StreamingAsset
from dagster_ckpt.stream.liveness import SLOW_START_MS
from dagster_ckpt.values.modes import DesiredState
from tests.support.manual_clock import ManualClock


def run_of_all(instance: dg.DagsterInstance, *assets: dg.AssetsDefinition) -> dg.DagsterRun:
    keys = {key for asset in assets for key in asset.required_resource_keys} - {"io_manager"}
    resources = dict.fromkeys(keys, dg.ResourceDefinition.none_resource())
    job = dg.Definitions(assets=assets, resources=resources).resolve_implicit_global_asset_job_def()
    return instance.create_run_for_job(job, status=DagsterRunStatus.STARTED)


class TestSharedRuns:
    """Two streams in one run, as of "Materialize all"."""

    @pytest.fixture
    def together(self, supervised: Supervised, orders: StreamingAsset, payments: StreamingAsset) -> dg.DagsterRun:
        run = run_of_all(supervised.instance, orders.asset, payments.asset)
        for stream_id in ("shop.payments", "orders"):
            begin_execution(supervised.catalog, stream_id, run.run_id)
        return run

    @pytest.mark.parametrize("asked", ["orders", "shop.payments"])
    def test_a_start_of_one_keeps_nobody_from_the_other(
        self, supervised: Supervised, clock: ManualClock, together: dg.DagsterRun, asked: str
    ) -> None:
        supervised.instance.report_run_failed(together)
        supervised.tick()
        clock.now_ms += DELAY_MS
        supervised.catalog.requests.submit(
            asked, RequestKind.START, arguments={"start_from": "latest"}, origin="a user"
        )

        requests = supervised.tick()

        assert {request.tags[STREAM_ID_TAG] for request in requests} == {"orders", "shop.payments"}

    @pytest.mark.parametrize("recorded", [ExecutionStatus.FAILED, None])
    @pytest.mark.parametrize("managed", [False, True])
    def test_one_that_died_is_restarted_while_the_run_goes_on(
        self,
        supervised: Supervised,
        clock: ManualClock,
        together: dg.DagsterRun,
        recorded: ExecutionStatus | None,
        managed: bool,
    ) -> None:
        executions = supervised.catalog.executions
        dead, lives = (executions.latest(each) for each in ("orders", "shop.payments"))
        assert dead is not None
        assert lives is not None
        if managed:
            supervised.catalog.desired_states.put("orders", DesiredState.RUNNING, origin="a user")
        if recorded is not None:
            executions.end_unheld(dead.execution_id, recorded, "killed for its memory")
        holder = replace(HOST, execution_id=lives.execution_id, run_id=lives.run_id)
        supervised.catalog.leases.acquire("shop.payments", holder, 24 * 3_600_000)
        clock.now_ms += SLOW_START_MS
        assert supervised.tick() == []
        clock.now_ms += 1
        supervised.tick()
        clock.now_ms += DELAY_MS

        requests = supervised.tick()

        assert [request.tags[STREAM_ID_TAG] for request in requests] == ["orders"]
        assert executions.get(dead.execution_id).status is ExecutionStatus.FAILED
        assert executions.get(lives.execution_id) == lives

    def test_a_lease_that_cannot_be_read_keeps_no_other_from_its_restart(
        self, supervised: Supervised, clock: ManualClock, together: dg.DagsterRun
    ) -> None:
        supervised.catalog.leases.acquire("orders", HOST, 1)
        with supervised.catalog.database.writing() as connection:
            connection.execute(leases.update().values(host=None))
        clock.now_ms += SLOW_START_MS + 1
        supervised.tick()
        clock.now_ms += DELAY_MS

        assert [request.tags[STREAM_ID_TAG] for request in supervised.tick()] == ["shop.payments"]

    def test_the_end_of_a_stream_with_a_run_of_its_own_is_waited_for(
        self, supervised: Supervised, clock: ManualClock, orders: StreamingAsset
    ) -> None:
        run = run_of_all(supervised.instance, orders.asset)
        execution = begin_execution(supervised.catalog, "orders", run.run_id)
        supervised.catalog.executions.end_unheld(execution.execution_id, ExecutionStatus.FAILED, "killed")
        clock.now_ms += 3_600_000

        assert supervised.tick() == []

    @pytest.mark.parametrize("alone", [False, True])
    def test_the_others_of_a_run_are_not_canceled_with_one(
        self, supervised: Supervised, together: dg.DagsterRun, orders: StreamingAsset, alone: bool
    ) -> None:
        run = together
        if alone:
            # Steps downstream of the stream do not run.
            after = dg.asset(deps=[orders.asset], name="after")(lambda: None)
            run = run_of_all(supervised.instance, orders.asset, after)
        step = SimpleNamespace(op=SimpleNamespace(name="orders"))

        report_canceling(SimpleNamespace(instance=supervised.instance, run=run, op_execution_context=step), "a test")  # type: ignore[arg-type]

        found = supervised.instance.get_run_by_id(run.run_id)
        assert found is not None
        assert found.status is (DagsterRunStatus.CANCELING if alone else DagsterRunStatus.STARTED)
