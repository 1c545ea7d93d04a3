"""Streams are brought to where they should be, whatever became of their processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus
from orchestration_catalog import HOST, begin_execution, register
from sqlalchemy import text

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.leases import LeaseRecords
from dagster_ckpt.catalog.records import (
    HANDS_OVER,
    EventType,
    ExecutionRecord,
    ExecutionStatus,
    LeaseRecord,
    RequestKind,
    RequestStatus,
    StartCause,
)
from dagster_ckpt.client.reconciliation import LAUNCH_MS
from dagster_ckpt.errors import CatalogError
from dagster_ckpt.orchestration import observed_runs
from dagster_ckpt.orchestration.jobs.operator_jobs import build_operator_jobs
from dagster_ckpt.orchestration.observed_runs import UNDEFINED_GRACE_MS, Claims, Silences, undefined_streams
from dagster_ckpt.orchestration.resources import CheckpointCatalogResource
from dagster_ckpt.orchestration.run_status import (
    DEPLOYMENT_TAG,
    RESTART_OF_TAG,
    START_REQUEST_TAG,
    STREAM_ID_TAG,
    TERMINAL_FAILURE_TAG,
    report_canceling,
)
from dagster_ckpt.orchestration.settings import StreamRunConfig
from dagster_ckpt.orchestration.stream import StreamingAsset
from dagster_ckpt.orchestration.supervisor_sensor import FIRST_PAUSE_MS, build_supervisor_sensor
from dagster_ckpt.stream.liveness import SLOW_START_MS, this_holder
from dagster_ckpt.values.durations import wall_clock_ms
from dagster_ckpt.values.modes import DesiredState, RecoveryClaimMode
from tests.support.as_writer import as_writer
from tests.support.manual_clock import ManualClock

DELAY_MS = 60_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock(wall_clock_ms())  # Dagster stamps the runs with the real time.
    monkeypatch.setattr("dagster_ckpt.orchestration.supervisor_sensor.wall_clock_ms", clock)
    return clock


class Supervised:
    """A sensor over an instance and a catalog, and the runs and executions it looks at."""

    def __init__(
        self, instance: dg.DagsterInstance, resource: CheckpointCatalogResource, clock: ManualClock, streams: list[Any]
    ) -> None:
        self.instance = instance
        self.resource = resource
        self.catalog = resource.catalog()
        self.clock = clock
        self.jobs = {job.name: job for job in build_operator_jobs(streams)}
        self.sensor = build_supervisor_sensor(
            streams, self.jobs["apply_retention_job"], self.jobs["roll_back_upgrade_job"]
        )

    def run(self, status: DagsterRunStatus, **tags: str) -> dg.DagsterRun:
        ours = {STREAM_ID_TAG: "orders", DEPLOYMENT_TAG: self.catalog.deployment_id}
        return self.instance.add_run(dg.DagsterRun("orders_stream", status=status, tags={**ours, **tags}))

    def execution(
        self, status: DagsterRunStatus, *, stream_id: str = "orders", cause: StartCause = StartCause.MANUAL
    ) -> ExecutionRecord:
        """An execution that the catalog believes to run, in a run that Dagster recorded with `status`."""
        return begin_execution(self.catalog, stream_id, self.run(status).run_id, cause=cause)

    def failed_for_good(self) -> ExecutionRecord:
        """The last of as many failures as the strategy of `orders` allows, and one more."""
        causes = [StartCause.MANUAL, StartCause.RESTART_NEW_RUN, StartCause.RESTART_NEW_RUN]
        return [self.execution(DagsterRunStatus.FAILURE, cause=cause) for cause in causes][-1]

    def tick(self) -> list[Any]:
        context = dg.build_sensor_context(self.instance, resources={"checkpoint_catalog": self.resource})
        return list(self.sensor.evaluate_tick(context).run_requests or [])


@pytest.fixture
def supervised(
    instance: dg.DagsterInstance,
    catalog_resource: CheckpointCatalogResource,
    orders: StreamingAsset,
    payments: StreamingAsset,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Supervised]:
    catalog = Catalog(catalog_resource.url, clock=clock)
    monkeypatch.setattr(CheckpointCatalogResource, "catalog", lambda _self: catalog)
    for stream_id in ("orders", "shop.payments", "elsewhere"):
        register(catalog, stream_id)
    yield Supervised(instance, catalog_resource, clock, [orders, payments])
    catalog.close()


def accepted(supervised: Supervised, request: Any) -> bool:
    """Whether the job takes the request's run config."""
    return bool(dg.validate_run_config(supervised.jobs[request.job_name], request.run_config))


def test_a_stream_that_was_never_started_needs_nothing(supervised: Supervised) -> None:
    assert supervised.tick() == []


@pytest.mark.parametrize(
    "status",
    [
        DagsterRunStatus.NOT_STARTED,
        DagsterRunStatus.STARTING,
        DagsterRunStatus.STARTED,
        DagsterRunStatus.CANCELING,
    ],
)
def test_a_run_that_goes_on_is_left_alone(supervised: Supervised, status: DagsterRunStatus) -> None:
    execution = supervised.execution(status)

    assert supervised.tick() == []
    assert supervised.catalog.executions.get(execution.execution_id) == execution


class TestRestart:
    def test_a_killed_run_is_started_again_once_the_delay_of_the_strategy_is_over(
        self, supervised: Supervised, clock: ManualClock
    ) -> None:
        execution = supervised.execution(DagsterRunStatus.FAILURE)

        assert supervised.tick() == []
        ended = supervised.catalog.executions.get(execution.execution_id)
        assert (ended.status, ended.reason) == (ExecutionStatus.FAILED, "its process died")
        # A run takes a while to begin: so much earlier is it asked for.
        clock.now_ms += DELAY_MS - LAUNCH_MS - 1
        assert supervised.tick() == []
        clock.now_ms += 1
        [request] = supervised.tick()

        assert request.job_name == "orders_stream"
        assert request.tags[RESTART_OF_TAG] == execution.execution_id
        assert request.tags[STREAM_ID_TAG] == "orders"
        # Without a start_from of its own, the run goes on from the latest state.
        assert not request.run_config

    def test_every_look_at_one_failure_asks_for_one_and_the_same_run(
        self, supervised: Supervised, clock: ManualClock
    ) -> None:
        supervised.execution(DagsterRunStatus.FAILURE)
        supervised.tick()
        clock.now_ms += DELAY_MS

        assert len({request.run_key for _ in range(3) for request in supervised.tick()}) == 1

    def test_the_run_of_a_run_that_was_deleted_counts_as_failed(
        self, supervised: Supervised, clock: ManualClock
    ) -> None:
        execution = supervised.execution(DagsterRunStatus.STARTED)
        supervised.instance.delete_run(execution.run_id)
        supervised.tick()
        clock.now_ms += DELAY_MS

        [request] = supervised.tick()

        assert request.tags[RESTART_OF_TAG] == execution.execution_id

    @pytest.mark.parametrize("status", [DagsterRunStatus.NOT_STARTED, DagsterRunStatus.STARTED])
    def test_there_is_no_second_one_while_it_is_under_way(
        self, supervised: Supervised, clock: ManualClock, status: DagsterRunStatus
    ) -> None:
        execution = supervised.execution(DagsterRunStatus.FAILURE)
        supervised.tick()
        clock.now_ms += DELAY_MS
        supervised.run(status, **{RESTART_OF_TAG: execution.execution_id})

        assert supervised.tick() == []

    def test_a_restart_that_ended_before_it_began_an_execution_is_tried_again_as_another_run(
        self, supervised: Supervised, clock: ManualClock
    ) -> None:
        execution = supervised.execution(DagsterRunStatus.FAILURE)
        supervised.tick()
        clock.now_ms += DELAY_MS
        [first] = supervised.tick()
        clock.now_ms = wall_clock_ms()
        supervised.run(DagsterRunStatus.FAILURE, **{RESTART_OF_TAG: execution.execution_id})
        assert supervised.tick() == []

        clock.now_ms += DELAY_MS + FIRST_PAUSE_MS
        [second] = supervised.tick()
        supervised.run(DagsterRunStatus.FAILURE, **{RESTART_OF_TAG: execution.execution_id})

        assert second.run_key != first.run_key

    def test_a_restarted_stream_settles_the_failure_before_it(self, supervised: Supervised, clock: ManualClock) -> None:
        supervised.execution(DagsterRunStatus.FAILURE)
        supervised.tick()
        clock.now_ms += DELAY_MS
        supervised.execution(DagsterRunStatus.STARTED, cause=StartCause.RESTART_NEW_RUN)

        assert supervised.tick() == []

    def test_a_person_who_starts_it_gives_it_all_its_restarts_again(
        self, supervised: Supervised, clock: ManualClock
    ) -> None:
        supervised.failed_for_good()
        supervised.execution(DagsterRunStatus.FAILURE, cause=StartCause.MANUAL)
        supervised.tick()
        clock.now_ms += DELAY_MS

        [request] = supervised.tick()

        assert request.job_name == "orders_stream"

    def test_each_stream_is_judged_by_its_own_strategy(self, supervised: Supervised, clock: ManualClock) -> None:
        supervised.execution(DagsterRunStatus.FAILURE)
        supervised.execution(DagsterRunStatus.FAILURE, stream_id="shop.payments")
        supervised.tick()
        # Flink's default with checkpointing is an exponential delay that begins with a second.
        clock.now_ms += 2000

        [request] = supervised.tick()

        assert request.job_name == "payments_stream"


class TestRetention:
    def config(self, request: Any) -> dict[str, Any]:
        config = request.run_config["ops"]["apply_retention"]["config"]
        assert isinstance(config, dict)
        return config

    def test_a_stream_that_may_not_be_restarted_any_more_has_failed(
        self, supervised: Supervised, clock: ManualClock
    ) -> None:
        execution = supervised.failed_for_good()

        [request] = supervised.tick()

        assert request.job_name == "apply_retention_job"
        assert self.config(request) == {
            "stream_id": "orders",
            "execution_id": execution.execution_id,
            "state": "FAILED",
        }
        assert accepted(supervised, request)
        assert supervised.tick()[0].run_key == request.run_key

    @pytest.mark.parametrize(
        ("recorded", "state"), [(DagsterRunStatus.CANCELED, "CANCELED"), (DagsterRunStatus.SUCCESS, "SUSPENDED")]
    )
    def test_a_run_that_could_not_clean_up_after_itself_has_it_done(
        self, supervised: Supervised, recorded: DagsterRunStatus, state: str
    ) -> None:
        execution = supervised.execution(recorded)

        [request] = supervised.tick()

        assert self.config(request)["state"] == state
        assert self.config(request)["execution_id"] == execution.execution_id
        assert accepted(supervised, request)

    def test_a_settled_execution_is_not_looked_at_again(self, supervised: Supervised) -> None:
        execution = supervised.execution(DagsterRunStatus.CANCELED)
        supervised.catalog.executions.settle(execution.execution_id, ExecutionStatus.CANCELED)

        assert supervised.tick() == []

    def test_while_it_is_being_applied_it_is_not_asked_for_again(self, supervised: Supervised) -> None:
        supervised.execution(DagsterRunStatus.CANCELED)
        [request] = supervised.tick()
        supervised.run(DagsterRunStatus.STARTED, **request.tags)

        assert supervised.tick() == []

    def test_a_retention_run_that_failed_is_tried_again_as_another_run_after_a_pause(
        self, supervised: Supervised, clock: ManualClock
    ) -> None:
        supervised.execution(DagsterRunStatus.CANCELED)
        [first] = supervised.tick()
        supervised.run(DagsterRunStatus.FAILURE, **first.tags)
        assert supervised.tick() == []

        clock.now_ms += 2 * FIRST_PAUSE_MS
        [second] = supervised.tick()

        assert second.run_key != first.run_key
        assert second.run_config == first.run_config

    def test_a_run_whose_predecessors_were_deleted_in_part_has_a_key_that_was_never_used(
        self, supervised: Supervised, clock: ManualClock
    ) -> None:
        supervised.execution(DagsterRunStatus.CANCELED)
        keys, runs = list[str](), list[dg.DagsterRun]()
        for _ in range(3):
            [request] = supervised.tick()
            keys.append(request.run_key)
            tags = {**request.tags, "dagster/run_key": request.run_key}
            runs.append(supervised.run(DagsterRunStatus.FAILURE, **tags))
            clock.now_ms += 20 * FIRST_PAUSE_MS
        supervised.instance.delete_run(runs[0].run_id)

        [request] = supervised.tick()

        assert request.run_key not in keys
        assert len(set(keys)) == 3


class TestGivingUp:
    """A crash loop ends with an alert that nobody can miss, once."""

    def test_the_last_run_its_tags_and_the_catalog_say_so(self, supervised: Supervised) -> None:
        execution = supervised.failed_for_good()

        [request] = supervised.tick()
        supervised.run(DagsterRunStatus.STARTED, **request.tags)
        supervised.tick()

        run = supervised.instance.get_run_by_id(execution.run_id)
        assert run is not None
        assert run.tags[TERMINAL_FAILURE_TAG] == "All 2 restart attempts are used up."
        told = [entry.message for entry in supervised.instance.all_logs(run.run_id)]
        assert told == [
            "The stream orders has failed for good after 3 failures: All 2 restart attempts are used up. The last "
            "one: its process died. Remove the cause, then start the stream's job again, or run restart_stream_job for "
            "orders; it continues from where it stopped."
        ]
        given_up = [event for event in supervised.catalog.events.after(0) if event.type is EventType.TERMINALLY_FAILED]
        assert [event.execution_id for event in given_up] == [execution.execution_id]

    def test_a_failure_that_is_made_good_is_no_alert(self, supervised: Supervised, clock: ManualClock) -> None:
        execution = supervised.execution(DagsterRunStatus.FAILURE)
        supervised.tick()
        clock.now_ms += DELAY_MS
        assert supervised.tick()

        run = supervised.instance.get_run_by_id(execution.run_id)
        assert run is not None
        assert TERMINAL_FAILURE_TAG not in run.tags


def test_a_stream_that_was_stopped_with_a_savepoint_is_not_started_again_where_its_clean_up_was_killed(
    supervised: Supervised, clock: ManualClock
) -> None:
    execution = supervised.execution(DagsterRunStatus.FAILURE)
    supervised.catalog.executions.end_unheld(
        execution.execution_id, ExecutionStatus.FINISHED, "stopped with a savepoint"
    )
    clock.now_ms += DELAY_MS

    [request] = supervised.tick()

    assert request.job_name == "apply_retention_job"
    assert request.run_config["ops"]["apply_retention"]["config"]["state"] == "FINISHED"


@pytest.mark.parametrize(("max_runtime", "end"), [("0", "CANCELED"), ("3600", None)])
def test_a_run_that_was_killed_while_a_person_terminated_it_is_canceled_whatever_dagster_calls_it(
    supervised: Supervised, max_runtime: str, end: str | None
) -> None:
    run = supervised.run(DagsterRunStatus.STARTED, **{"dagster/max_runtime": max_runtime})
    begin_execution(supervised.catalog, "orders", run.run_id)
    supervised.instance.report_run_canceling(run)
    supervised.instance.report_run_failed(run)

    states = [request.run_config["ops"]["apply_retention"]["config"]["state"] for request in supervised.tick()]

    # A time limit terminates in the same way: such a run has failed, and is restarted after the delay.
    assert states == ([end] if end else [])


def test_nothing_is_deleted_while_a_canceled_stream_still_stops(supervised: Supervised, clock: ManualClock) -> None:
    execution = supervised.execution(DagsterRunStatus.CANCELED)
    holder = replace(HOST, execution_id=execution.execution_id, run_id=execution.run_id)
    lease = supervised.catalog.leases.acquire("orders", holder, 30_000)
    assert supervised.tick() == []

    supervised.catalog.leases.release("orders", lease.token)

    assert [request.job_name for request in supervised.tick()] == ["apply_retention_job"]


def test_a_process_that_renews_its_lease_is_not_declared_dead_nor_replaced(
    supervised: Supervised, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run was recorded as failed by mistake. Its death was written without asking for its lease."""
    execution = supervised.execution(DagsterRunStatus.FAILURE)
    holder = replace(HOST, execution_id=execution.execution_id, run_id=execution.run_id)
    lease = supervised.catalog.leases.acquire("orders", holder, 30_000)
    current = LeaseRecords.current

    def renewed_meanwhile(leases: LeaseRecords, stream_id: str) -> LeaseRecord | None:
        found = current(leases, stream_id)
        clock.now_ms += 1
        leases.renew(stream_id, lease.token, 30_000)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(LeaseRecords, "current", renewed_meanwhile)
        clock.now_ms += DELAY_MS
        assert supervised.tick() == []

    assert supervised.catalog.executions.get(execution.execution_id).status is ExecutionStatus.RUNNING
    clock.now_ms += DELAY_MS
    # Now it renews it no longer: found dead, and replaced after the delay.
    assert supervised.tick() == []
    assert supervised.catalog.executions.get(execution.execution_id).status is ExecutionStatus.FAILED
    clock.now_ms += DELAY_MS
    assert [request.job_name for request in supervised.tick()] == ["orders_stream"]


def test_a_process_of_this_machine_that_holds_its_lease_is_not_declared_dead(supervised: Supervised) -> None:
    execution = supervised.execution(DagsterRunStatus.FAILURE)
    supervised.catalog.leases.acquire("orders", this_holder(execution.execution_id, execution.run_id, None), 30_000)

    assert supervised.tick() == []

    assert supervised.catalog.executions.get(execution.execution_id).status is ExecutionStatus.RUNNING


class TestStart:
    def ask(self, supervised: Supervised, **arguments: str) -> str:
        return supervised.catalog.requests.submit(
            "orders", RequestKind.START, arguments=arguments, origin="a test"
        ).request_id

    def test_a_start_that_was_asked_for_is_launched_from_where_it_was_asked_to(self, supervised: Supervised) -> None:
        request_id = self.ask(supervised, start_from="chk-7")

        [request] = supervised.tick()

        assert request.job_name == "orders_stream"
        assert request.run_config == {"ops": {"orders": {"config": {"start_from": "chk-7"}}}}
        assert request.tags[START_REQUEST_TAG] == request_id

    @pytest.mark.parametrize(("asked", "told"), [("CLAIM", {"claim_mode": "CLAIM"}), ("NO_CLAIM", {})])
    def test_a_claim_reaches_the_run_in_words_that_its_config_knows(
        self, supervised: Supervised, asked: str, told: dict[str, str]
    ) -> None:
        self.ask(supervised, start_from="mine", claim_mode=asked)

        [request] = supervised.tick()

        config = {"start_from": "mine", **told}
        assert request.run_config == {"ops": {"orders": {"config": config}}}
        assert StreamRunConfig(**config).claim_mode is RecoveryClaimMode(asked)
        assert request.tags[STREAM_ID_TAG] == "orders"
        assert supervised.tick()[0].run_key == request.run_key

    def test_the_same_request_in_a_re_created_catalog_is_another_run(
        self, supervised: Supervised, clock: ManualClock
    ) -> None:
        # Requests of a desired state get the same ids again.
        submit = partial(supervised.catalog.requests.submit, "orders", RequestKind.START, request_id="the id")
        submit(origin="a test")
        [first] = supervised.tick()
        with supervised.catalog.database.writing() as connection:
            connection.execute(text("DELETE FROM requests"))
        clock.now_ms += 1
        submit(origin="a test")

        [second] = supervised.tick()

        assert second.run_key != first.run_key
        assert str(first.run_key).endswith(supervised.catalog.deployment_id)

    def test_a_start_whose_run_is_under_way_is_not_asked_for_again(self, supervised: Supervised) -> None:
        supervised.run(DagsterRunStatus.STARTED, **{START_REQUEST_TAG: self.ask(supervised, start_from="latest")})

        assert supervised.tick() == []

    def test_a_failed_run_is_not_restarted_beside_a_start_whose_run_is_under_way(
        self, supervised: Supervised, clock: ManualClock
    ) -> None:
        supervised.execution(DagsterRunStatus.FAILURE)
        supervised.tick()
        run = supervised.run(DagsterRunStatus.STARTING, **{START_REQUEST_TAG: self.ask(supervised, start_from="chk-3")})
        clock.now_ms += 60 * FIRST_PAUSE_MS

        assert supervised.tick() == []
        supervised.instance.report_run_failed(run)
        [request] = supervised.tick()
        assert RESTART_OF_TAG in request.tags

    def test_a_start_that_is_answered_or_withdrawn_is_not_launched(self, supervised: Supervised) -> None:
        supervised.catalog.requests.withdraw(self.ask(supervised, start_from="latest"))
        as_writer(supervised.catalog).requests.resolve(
            self.ask(supervised, start_from="latest"), RequestStatus.COMPLETED
        )

        assert supervised.tick() == []

    def test_other_requests_are_for_the_stream_itself(self, supervised: Supervised) -> None:
        supervised.catalog.requests.submit("orders", RequestKind.SAVEPOINT, origin="a test")

        assert supervised.tick() == []

    def test_a_start_that_was_asked_for_comes_before_the_restart_of_what_failed(
        self, supervised: Supervised, clock: ManualClock
    ) -> None:
        supervised.execution(DagsterRunStatus.FAILURE)
        supervised.tick()
        clock.now_ms += DELAY_MS
        request_id = self.ask(supervised, start_from="chk-7")

        [request] = supervised.tick()

        assert request.tags[START_REQUEST_TAG] == request_id

    def test_a_start_waits_for_the_restart_that_is_under_way(self, supervised: Supervised, clock: ManualClock) -> None:
        """Both would compete for the lease, and the loser's request would fail."""
        execution = supervised.execution(DagsterRunStatus.FAILURE)
        supervised.tick()
        clock.now_ms += DELAY_MS
        [restart] = supervised.tick()
        run = supervised.run(DagsterRunStatus.STARTED, **{RESTART_OF_TAG: execution.execution_id})
        assert restart.tags[RESTART_OF_TAG] == execution.execution_id
        request_id = self.ask(supervised, start_from="chk-7")
        assert supervised.tick() == []

        begin_execution(supervised.catalog, "orders", run.run_id, cause=StartCause.RESTART_NEW_RUN)

        [request] = supervised.tick()
        assert request.tags[START_REQUEST_TAG] == request_id


def test_a_job_of_another_code_location_is_left_to_it(supervised: Supervised) -> None:
    execution = supervised.execution(DagsterRunStatus.FAILURE, stream_id="elsewhere")
    supervised.catalog.requests.submit("elsewhere", RequestKind.START, origin="a test")

    assert supervised.tick() == []
    assert supervised.catalog.executions.get(execution.execution_id).status is ExecutionStatus.RUNNING


def test_a_start_whose_run_ended_before_it_could_answer_is_answered_and_holds_nothing_back(
    supervised: Supervised,
) -> None:
    request = supervised.catalog.requests.submit("orders", RequestKind.START, origin="a person")
    supervised.run(DagsterRunStatus.FAILURE, **{START_REQUEST_TAG: request.request_id})
    assert supervised.tick() == []
    answered = supervised.catalog.requests.get(request.request_id)
    assert answered.status is RequestStatus.FAILED
    assert "ended FAILURE before it could start the stream" in (answered.error or "")


@pytest.mark.parametrize("has_stopped", [False, True], ids=["that still runs", "that has stopped for it"])
def test_a_start_whose_run_died_in_a_hand_over_leaves_the_query_alone_or_is_launched_again(
    supervised: Supervised, clock: ManualClock, has_stopped: bool
) -> None:
    old = supervised.execution(DagsterRunStatus.STARTED)
    requests = supervised.catalog.requests
    start = requests.submit("orders", RequestKind.START, arguments={HANDS_OVER: True}, origin="a person")
    [launched] = supervised.tick()
    supervised.run(DagsterRunStatus.FAILURE, **{START_REQUEST_TAG: start.request_id})
    suspend = requests.suspend_for(start.request_id)
    assert suspend is not None
    clock.now_ms += 2 * FIRST_PAUSE_MS
    if has_stopped:
        ends = (ExecutionStatus.SUSPENDED, "asked")
        writer = as_writer(supervised.catalog).executions
        assert writer.end(old.execution_id, *ends, settled=True, request_id=suspend.request_id)

    again = supervised.tick()

    status = requests.get(start.request_id).status
    assert status is (RequestStatus.PENDING if has_stopped else RequestStatus.FAILED)
    assert requests.get(suspend.request_id).status is not RequestStatus.PENDING
    tags = [(each.tags.get(START_REQUEST_TAG), each.run_key != launched.run_key) for each in again]
    assert tags == ([(start.request_id, True)] if has_stopped else [])
    assert has_stopped or requests.suspend_for(start.request_id) is None


def test_a_stream_that_runs_and_that_no_asset_defines_any_more_is_reported_with_both_ways_on(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after its asset was renamed: the old query runs on, and nothing supervises it."""
    monkeypatch.setattr(observed_runs, "UNDEFINED_GRACE_MS", 0)
    register(supervised.catalog, "renamed")
    run = supervised.run(DagsterRunStatus.STARTED)
    execution = begin_execution(supervised.catalog, "renamed", run.run_id)
    context = dg.build_sensor_context(supervised.instance, resources={"checkpoint_catalog": supervised.resource})

    told = supervised.sensor.evaluate_tick(context).skip_message

    assert told == (
        f"renamed: it is not settled (run {run.run_id}), and no asset of this code location has this stream id, so "
        "nothing supervises it. Set stream_id='renamed' in the definition that continues it, or retire it: "
        "dagster-ckpt retire renamed"
    )
    as_writer(supervised.catalog, "renamed").executions.end(
        execution.execution_id, ExecutionStatus.CANCELED, "retired", settled=True
    )
    assert "renamed" not in (supervised.sensor.evaluate_tick(context).skip_message or "")
    supervised.catalog.desired_states.put("renamed", DesiredState.RUNNING, origin="a test")
    assert "renamed: it is to run" in (supervised.sensor.evaluate_tick(context).skip_message or "")


def test_a_stream_of_another_code_location_is_its_own_to_report(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(supervised.catalog, "theirs")
    run = supervised.run(DagsterRunStatus.STARTED)
    begin_execution(supervised.catalog, "theirs", run.run_id)
    streams = {"orders": None}
    now_ms = 0
    silences, claims = Silences(lambda: now_ms), Claims("sensor")

    class Origin:
        location_name = "theirs"

    monkeypatch.setattr(dg.DagsterRun, "remote_job_origin", Origin())

    def undefined(location: str) -> list[str]:
        known = (supervised.instance, supervised.catalog, streams, location)
        return undefined_streams(*known, silences=silences, claims=claims)  # type: ignore[arg-type]

    assert undefined("theirs") == [], "its code location may be about to be replaced"
    now_ms = UNDEFINED_GRACE_MS
    assert undefined("ours") == []
    assert supervised.catalog.desired_states.find("theirs") is None
    assert len(undefined("theirs")) == 1
    assert len(undefined("theirs")) == 1
    row = supervised.catalog.desired_states.find("theirs")
    assert row is not None
    assert (row.desired, (row.alert or "")[:16]) == (None, "it is not settle")

    streams["theirs"] = None
    assert undefined("theirs") == []
    row = supervised.catalog.desired_states.find("theirs")
    assert row is not None
    assert (row.alert, row.alert_until) == (None, None)


def test_a_stream_whose_asset_moved_to_another_code_location_is_not_reported_by_the_former_one(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two sensors undid the other's alert, whose advice was to retire the stream."""
    register(supervised.catalog, "moved")
    begin_execution(supervised.catalog, "moved", supervised.run(DagsterRunStatus.STARTED).run_id)
    now_ms = 0

    class Origin:
        location_name = "former"

    monkeypatch.setattr(dg.DagsterRun, "remote_job_origin", Origin())
    monkeypatch.setattr(observed_runs, "UNDEFINED_GRACE_MS", 1)
    sensors = {name: (Silences(lambda: now_ms), Claims("sensor", lambda: now_ms)) for name in ("former", "new")}

    def tick(location: str, *stream_ids: str) -> list[str]:
        silences, claims = sensors[location]
        known = (supervised.instance, supervised.catalog, dict.fromkeys(stream_ids), location)
        return undefined_streams(*known, silences=silences, claims=claims)  # type: ignore[arg-type]

    for _ in range(10):
        now_ms += 60_000
        assert tick("new", "moved") == tick("former") == []
    assert supervised.catalog.desired_states.find("moved") is None
    # The other code location is gone.
    for _ in range(4):
        now_ms += 60_000
        told = tick("former")
    assert len(told) == 1
    # One that forgets its own stream says so at once.
    tick("former", "moved")
    now_ms += 60_000
    tick("former")
    now_ms += 60_000
    assert len(tick("former")) == 1


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
            # What needs the stream does not go on without it.
            after = dg.asset(deps=[orders.asset], name="after")(lambda: None)
            run = run_of_all(supervised.instance, orders.asset, after)
        step = SimpleNamespace(op=SimpleNamespace(name="orders"))

        report_canceling(SimpleNamespace(instance=supervised.instance, run=run, op_execution_context=step), "a test")  # type: ignore[arg-type]

        found = supervised.instance.get_run_by_id(run.run_id)
        assert found is not None
        assert found.status is (DagsterRunStatus.CANCELING if alone else DagsterRunStatus.STARTED)


def test_one_stream_that_cannot_be_read_keeps_no_other_from_its_restart(
    supervised: Supervised, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervised.execution(DagsterRunStatus.FAILURE)
    supervised.execution(DagsterRunStatus.FAILURE, stream_id="shop.payments")
    supervised.tick()
    clock.now_ms += DELAY_MS
    real = supervised.catalog.executions.failures_since_manual_start

    def unreadable(stream_id: str) -> list[int]:
        if stream_id == "orders":
            raise CatalogError("a row of orders cannot be read")
        return real(stream_id)

    monkeypatch.setattr(supervised.catalog.executions, "failures_since_manual_start", unreadable)

    assert [request.tags[STREAM_ID_TAG] for request in supervised.tick()] == ["shop.payments"]
