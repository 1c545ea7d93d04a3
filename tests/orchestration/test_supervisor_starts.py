"""The supervisor sensor launches the starts that were requested, each once."""

from __future__ import annotations

from functools import partial

import pytest
from dagster import DagsterRunStatus
from orchestration_catalog import begin_execution
from sqlalchemy import text
from supervised_streams import DELAY_MS, Supervised

from dagster_ckpt.catalog.records import (
    HANDS_OVER,
    ExecutionStatus,
    RequestKind,
    RequestStatus,
    StartCause,
)
from dagster_ckpt.orchestration.run_status import (
    RESTART_OF_TAG,
    START_REQUEST_TAG,
    STREAM_ID_TAG,
)
from dagster_ckpt.orchestration.settings import StreamRunConfig
from dagster_ckpt.orchestration.supervisor_sensor import FIRST_PAUSE_MS
from dagster_ckpt.values.modes import RecoveryClaimMode
from tests.support.as_writer import as_writer, holding
from tests.support.manual_clock import ManualClock


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

    @pytest.mark.parametrize(("asked", "given"), [("CLAIM", {"claim_mode": "CLAIM"}), ("NO_CLAIM", {})])
    def test_a_claim_reaches_the_run_in_words_that_its_config_knows(
        self, supervised: Supervised, asked: str, given: dict[str, str]
    ) -> None:
        self.ask(supervised, start_from="mine", claim_mode=asked)

        [request] = supervised.tick()

        config = {"start_from": "mine", **given}
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


def test_a_start_that_a_process_carries_out_though_its_run_was_killed_is_left_to_it(supervised: Supervised) -> None:
    requests = supervised.catalog.requests
    start = requests.submit("orders", RequestKind.START, origin="a person")
    supervised.run(DagsterRunStatus.FAILURE, **{START_REQUEST_TAG: start.request_id})

    with holding(supervised.catalog) as lease:
        assert requests.take_start(lease, start.request_id)
        assert supervised.tick() == []
        assert requests.get(start.request_id).status is RequestStatus.PENDING

    assert supervised.tick() == []
    assert requests.get(start.request_id).status is RequestStatus.FAILED


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
