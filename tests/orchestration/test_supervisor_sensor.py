"""Streams are brought to where they should be, whatever became of their processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus
from orchestration_catalog import HOST, begin_execution
from supervised_streams import DELAY_MS, Supervised, accepted

from dagster_ckpt.catalog.leases import LeaseRecords
from dagster_ckpt.catalog.records import (
    EventType,
    ExecutionStatus,
    LeaseRecord,
    StartCause,
)
from dagster_ckpt.catalog.tables import leases
from dagster_ckpt.client.reconciliation import LAUNCH_MS
from dagster_ckpt.errors import CatalogError
from dagster_ckpt.orchestration.run_status import (
    RESTART_OF_TAG,
    STREAM_ID_TAG,
    TERMINAL_FAILURE_TAG,
)
from dagster_ckpt.orchestration.supervisor_sensor import FIRST_PAUSE_MS
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.values.durations import wall_clock_ms
from tests.support.manual_clock import ManualClock


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

    supervised.catalog.leases.release(lease)

    assert [request.job_name for request in supervised.tick()] == ["apply_retention_job"]


def test_a_process_that_renews_its_lease_is_not_declared_dead_nor_replaced(
    supervised: Supervised, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run was recorded as failed by mistake. Its death was written without asking for its lease."""
    execution = supervised.execution(DagsterRunStatus.FAILURE)
    holder = replace(HOST, execution_id=execution.execution_id, run_id=execution.run_id)
    lease = supervised.catalog.leases.acquire("orders", holder, 30_000)
    current = LeaseRecords.current

    def renewed_meanwhile(records: LeaseRecords, stream_id: str) -> LeaseRecord | None:
        found = current(records, stream_id)
        clock.now_ms += 1
        records.renew(lease, 30_000)
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


def test_a_lease_that_cannot_be_read_keeps_no_other_stream_from_its_restart(
    supervised: Supervised, capfd: pytest.CaptureFixture[str]
) -> None:
    """The tick failed, and with it each later one."""
    for stream_id in ("orders", "shop.payments"):
        supervised.execution(DagsterRunStatus.FAILURE, stream_id=stream_id)
    supervised.catalog.leases.acquire("orders", HOST, 1)
    with supervised.catalog.database.writing() as connection:
        connection.execute(leases.update().values(host=None))

    assert [request.tags[STREAM_ID_TAG] for request in supervised.tick()] == ["shop.payments"]
    assert "orders: no action: The lease of stream 'orders' cannot be read: host is missing" in capfd.readouterr().err


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
