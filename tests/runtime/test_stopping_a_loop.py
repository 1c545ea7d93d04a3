"""A stream that is restarted again and again is stopped by a cancel or suspend, also between two restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt import driver
from dagster_ckpt.catalog.records import RESTART_OF, ExecutionStatus, RequestKind, RequestStatus, StartCause
from dagster_ckpt.client.launching import START_REQUEST_VARIABLE, start_order
from dagster_ckpt.client.lifecycle import StopResult
from dagster_ckpt.errors import RequestFailedError, RestartWithdrawnError
from dagster_ckpt.flink import program
from dagster_ckpt.policies.restart import RestartStrategies
from dagster_ckpt.runtime.run_request import EndKind
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup
from tests.support.as_writer import as_writer
from tests.support.played_query import PlayedQuery, Stage
from tests.support.retention_shelf import STREAM, Shelf
from tests.support.verbs import cancel, suspend

ME = "a person"


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf.at(tmp_path).cleaning_up(ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION)
    as_writer(shelf.stream.catalog, STREAM).executions.end("first", ExecutionStatus.FAILED, "its process died")
    yield shelf
    shelf.stream.catalog.close()


def state(shelf: Shelf) -> tuple[ExecutionStatus, bool]:
    last = shelf.stream.catalog.executions.get("first")
    return last.status, last.settled


def test_known_defect_8_a_cancel_between_two_restarts_ends_it_and_says_so(shelf: Shelf) -> None:
    snapshot = shelf.checkpoint()

    stopped = cancel(shelf.stream, origin=ME)

    assert "was not running, and will not be restarted" in stopped.messages()[0]
    assert stopped.retention is not None
    assert not stopped.was_running
    assert state(shelf) == (ExecutionStatus.CANCELED, True)
    # As the clean-up option says for a cancellation.
    assert not shelf.is_whole(snapshot)
    assert STREAM not in shelf.stream.catalog.executions.unsettled_runs()


def test_a_suspend_between_two_restarts_ends_it_and_keeps_everything(shelf: Shelf) -> None:
    snapshot = shelf.checkpoint()

    stopped = suspend(shelf.stream, origin=ME)

    assert (stopped.was_running, stopped.retention) == (False, None)
    assert state(shelf) == (ExecutionStatus.SUSPENDED, True)
    assert shelf.is_whole(snapshot)
    with pytest.raises(RequestFailedError, match="is not running"):
        suspend(shelf.stream, origin=ME)


@pytest.mark.parametrize("stop", [cancel, suspend])
def test_a_restart_that_was_launched_before_does_not_begin_after_it(
    shelf: Shelf, stop: Callable[..., StopResult]
) -> None:
    stop(shelf.stream, origin=ME)
    stage = Stage(shelf.stream, [PlayedQuery(ends=True)])

    with pytest.raises(RestartWithdrawnError, match="by a person between two restarts"):
        stage.run(cause=StartCause.RESTART_NEW_RUN, restart_of="first")

    assert stage.started_in == []
    assert len(stage.ends()) == 1


def test_a_queued_restart_does_not_begin_after_the_stream_was_started_and_suspended_by_hand(shelf: Shelf) -> None:
    shelf.stream.catalog.requests.submit(STREAM, RequestKind.SUSPEND, origin=ME)
    assert Stage(shelf.stream, [PlayedQuery()]).run().end.kind is EndKind.SUSPENDED
    late = Stage(shelf.stream, [PlayedQuery(ends=True)])

    with pytest.raises(RestartWithdrawnError, match="it is SUSPENDED, suspend requested by a person"):
        late.run(cause=StartCause.RESTART_NEW_RUN, restart_of="first")

    assert late.started_in == []


def restart_launched(shelf: Shelf) -> str:
    arguments = {"run_id": "restart", "cause": StartCause.RESTART_NEW_RUN.value, RESTART_OF: "first"}
    asked = shelf.stream.catalog.requests.submit(STREAM, RequestKind.START, arguments=arguments, origin="a run")
    return asked.request_id


@pytest.fixture
def drive(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The driver that was launched for a request, or a spare; it has no Spark, so it can only be refused."""
    monkeypatch.setattr(program, "active_in_thread", lambda _spark: nullcontext())
    monkeypatch.setattr(program, "application_of", lambda _spark: None)
    monkeypatch.setattr(program, "jvm_pid", lambda _spark: None)
    how = {"spark": None, "otherwise": StartFrom(), "unexpected_rows": None, "run_id": None}

    def run(request_id: str | None = None, *, is_spare: bool = False) -> Any:
        if request_id is not None:
            monkeypatch.setenv(START_REQUEST_VARIABLE, request_id)
        return driver._run_once(
            shelf.stream, lambda: pytest.fail("it starts"), is_spare=is_spare, has_waited=is_spare, **how
        )  # type: ignore[arg-type]

    return run


@pytest.mark.parametrize("stop", [cancel, suspend])
def test_a_driver_that_was_launched_before_does_not_start_after_it(
    shelf: Shelf, stop: Callable[..., StopResult], drive: Callable[..., Any]
) -> None:
    request_id = restart_launched(shelf)
    stop(shelf.stream, origin=ME)

    with pytest.raises(RestartWithdrawnError, match="by a person between two restarts"):
        drive(request_id)

    answer = shelf.stream.catalog.requests.get(request_id)
    assert (answer.status, len(Stage(shelf.stream, []).ends())) == (RequestStatus.FAILED, 1)


@pytest.mark.parametrize("stop", [cancel, suspend])
def test_a_driver_that_its_cluster_starts_again_does_not_start_after_it(
    shelf: Shelf, stop: Callable[..., StopResult], drive: Callable[..., Any]
) -> None:
    request_id = restart_launched(shelf)
    as_writer(shelf.stream.catalog).requests.resolve(request_id, RequestStatus.COMPLETED)
    stop(shelf.stream, origin=ME)

    with pytest.raises(RestartWithdrawnError, match="by a person between two restarts"):
        drive(request_id)


def test_a_spare_does_not_continue_after_it(shelf: Shelf, drive: Callable[..., Any]) -> None:
    suspend(shelf.stream, origin=ME)

    assert drive(is_spare=True) is None
    assert len(Stage(shelf.stream, []).ends()) == 1


def test_a_start_by_hand_is_carried_out_after_it(shelf: Shelf) -> None:
    cancel(shelf.stream, origin=ME)
    asked = shelf.stream.catalog.requests.submit(STREAM, RequestKind.START, origin=ME).request_id
    environment = {START_REQUEST_VARIABLE: asked}
    order = start_order(shelf.stream.catalog, STREAM, otherwise=StartFrom(), environment=environment)
    stage = Stage(shelf.stream, [PlayedQuery(ends=True), PlayedQuery(ends=True)])

    stage.run(cause=order.cause, start_request_id=order.request_id, restart_of=order.restart_of)
    # As a service starts its program.
    order = start_order(shelf.stream.catalog, STREAM, otherwise=StartFrom(), environment={})
    stage.run(cause=order.cause, restart_of=order.restart_of)

    assert len(stage.started_in) == 2


@pytest.mark.parametrize(
    ("kind", "end", "status"),
    [
        (RequestKind.CANCEL, EndKind.CANCEL_REQUESTED, ExecutionStatus.CANCELED),
        (RequestKind.SUSPEND, EndKind.SUSPENDED, ExecutionStatus.SUSPENDED),
    ],
)
def test_a_run_that_waits_for_its_next_restart_answers(
    shelf: Shelf, kind: RequestKind, end: EndKind, status: ExecutionStatus
) -> None:
    stream = replace(shelf.stream, restart=RestartStrategies.fixed_delay_restart(9, 3_600_000))
    asked = stream.catalog.requests.submit
    stage = Stage(stream, [PlayedQuery(error="ZeroDivisionError")])

    def ask_once_it_has_failed() -> bool:
        if stage.reports[-1].startswith("Restarting") and not stream.catalog.requests.pending(STREAM):
            asked(STREAM, kind, origin="a person", request_id="stop")
        return False

    outcome = stage.run(interrupted=ask_once_it_has_failed).end.kind

    assert outcome is end
    last = stream.catalog.executions.latest(STREAM)
    assert last is not None
    assert last.status is status
    assert stream.catalog.requests.get("stop").status is RequestStatus.COMPLETED
