"""Requests to stop a run or to take a snapshot: answered once, withdrawn, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.records import ExecutionStatus, RequestKind, RequestStatus, SnapshotStatus, StartCause
from dagster_ckpt.catalog.tables import snapshots
from dagster_ckpt.client import requests
from dagster_ckpt.errors import (
    CatalogError,
    NothingCommittedError,
    RequestFailedError,
    StorageAccessError,
)
from dagster_ckpt.policies.restart import RestartStrategies
from dagster_ckpt.runtime import run_request, supervision
from dagster_ckpt.runtime.checkpoint_attempts import AttemptRunner
from dagster_ckpt.runtime.run_request import EndKind
from dagster_ckpt.values.durations import monotonic_ms
from tests.support import verbs
from tests.support.as_writer import as_writer
from tests.support.played_query import PlayedQuery, Stage
from tests.support.retention_shelf import Shelf

ORIGIN = "a test"


def test_a_cancel_and_a_suspend_end_a_run_that_has_not_committed_a_batch(stage: Callable[..., Stage]) -> None:
    for kind, end in ((RequestKind.CANCEL, EndKind.CANCEL_REQUESTED), (RequestKind.SUSPEND, EndKind.SUSPENDED)):
        play = stage(PlayedQuery())
        play.stream.register()
        request = play.stream.catalog.requests.submit("orders", kind, origin="a test")

        assert play.run().end.kind is end
        assert play.stream.catalog.requests.get(request.request_id).status is RequestStatus.COMPLETED


def test_a_savepoint_of_a_stream_that_has_not_run_yet_is_refused(stage: Callable[..., Stage]) -> None:
    play = stage()
    play.stream.register()

    with pytest.raises(NothingCommittedError, match="never ran"):
        verbs.trigger_savepoint(play.stream, origin=ORIGIN)

    assert play.stream.catalog.snapshots.of_stream("orders") == []


@pytest.mark.parametrize("ask", [verbs.stop_with_savepoint, verbs.cancel, verbs.suspend, verbs.trigger_checkpoint])
def test_what_only_a_running_stream_can_do_is_refused_of_one_that_does_not_run(
    stage: Callable[..., Stage], ask: Callable[..., object]
) -> None:
    play = stage()
    play.stream.register()

    with pytest.raises(RequestFailedError, match="is not running"):
        ask(play.stream, origin=ORIGIN)

    assert play.stream.catalog.requests.pending("orders") == []


def asked_to_stop(shelf: Shelf) -> str:
    request = shelf.stream.catalog.requests.submit("orders", RequestKind.STOP_WITH_SAVEPOINT, origin="a test")
    return request.request_id


def test_a_stop_whose_savepoint_is_complete_only_after_its_time_has_failed_and_the_query_goes_on(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = shelf.stream.store.write_savepoint
    passed_ms = [0]

    def late(*args: Any, should_abort: Callable[[], bool], **how: Any) -> Any:
        passed_ms[0] = shelf.stream.options.timeout
        while not should_abort():
            pass
        return write(*args, should_abort=lambda: False, **how)

    monkeypatch.setattr(shelf.stream.store, "write_savepoint", late)
    monkeypatch.setattr(supervision, "monotonic_ms", lambda: monotonic_ms() + passed_ms[0])
    play = Stage(shelf.stream, [PlayedQuery(), PlayedQuery(ends=True)])
    request_id = asked_to_stop(shelf)

    outcome = play.run()

    assert outcome.end.kind is EndKind.ENDED_BY_ITSELF
    assert len(play.started_in) == 2
    assert "completed too late" in " ".join(play.reports)
    # The second ended by itself.
    assert [each[0] for each in play.ends()][1:] == [ExecutionStatus.SUSPENDED] * 2
    assert shelf.stream.catalog.requests.get(request_id).status is RequestStatus.FAILED


@pytest.mark.parametrize("error", [KeyboardInterrupt("killed"), CatalogError("the database is away")], ids=repr)
def test_a_stop_whose_savepoint_fails_leaves_a_stream_that_is_restarted_if_its_process_dies_at_once(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    catalog: Any = shelf.stream.catalog
    starts = iter([catalog.executions.start])

    def full(*_args: Any, **_how: Any) -> None:
        raise StorageAccessError("no space left")

    def start(*args: Any, **how: Any) -> Any:
        for first in starts:
            return first(*args, **how)
        raise error

    monkeypatch.setattr(shelf.stream.store, "write_savepoint", full)
    monkeypatch.setattr(catalog.executions, "start", start)
    request_id = asked_to_stop(shelf)

    with pytest.raises(type(error)):
        Stage(shelf.stream, [PlayedQuery()]).run()

    assert catalog.requests.get(request_id).status is RequestStatus.FAILED
    latest = catalog.executions.latest("orders")
    assert (latest.status, latest.settled) == (ExecutionStatus.RUNNING, False)


STOPS = [(RequestKind.CANCEL, ExecutionStatus.CANCELED), (RequestKind.SUSPEND, ExecutionStatus.SUSPENDED)]


@pytest.mark.parametrize(("kind", "status"), [*STOPS, (RequestKind.STOP_WITH_SAVEPOINT, ExecutionStatus.FINISHED)])
def test_a_stop_is_answered_and_recorded_together_or_not_at_all(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, kind: RequestKind, status: ExecutionStatus
) -> None:
    catalog, answers = shelf.stream.catalog, []
    executions: Any = catalog.executions
    end = executions._record_end

    def broken(*_args: Any, **_how: Any) -> None:
        executions._record_end = end
        answers.append(catalog.requests.get(request.request_id).status)
        raise CatalogError("the connection broke")

    request = catalog.requests.submit("orders", kind, origin="a test")

    def look() -> bool:
        if not answers:
            # Not earlier: a start records the end of the execution before it.
            monkeypatch.setattr(executions, "_record_end", broken)
        answers.append(catalog.requests.get(request.request_id).status)
        return False

    outcome = Stage(shelf.stream, [PlayedQuery()]).run(interrupted=look)

    assert set(answers) <= {RequestStatus.PENDING, RequestStatus.ACCEPTED}
    answer = catalog.requests.get(request.request_id)
    assert answer.status is RequestStatus.COMPLETED
    assert answer.snapshot_id == (outcome.savepoint.snapshot_id if outcome.savepoint is not None else None)
    # Of what is suspended everything is kept, so nothing is left to settle.
    latest = catalog.executions.latest("orders")
    assert latest is not None
    assert (latest.status, latest.settled) == (status, kind is RequestKind.SUSPEND)


def withdrawn_just_before(shelf: Shelf, method: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Withdraw a request between its being read and its being carried out."""
    catalog = shelf.stream.catalog
    executions: Any = catalog.executions
    carry_out, withdrawn = getattr(executions, method), list[str]()

    def too_late(*args: Any, request_id: str | None = None, **how: Any) -> bool:
        if request_id is not None and catalog.requests.withdraw(request_id):
            withdrawn.append(request_id)
        return bool(carry_out(*args, request_id=request_id, **how))

    monkeypatch.setattr(executions, method, too_late)
    return withdrawn


@dataclass
class InABatch(PlayedQuery):
    """Its batch 1 commits once it was polled so often by what waits for it before the query is stopped."""

    live: Path = Path()
    polls: int = 0
    had_committed: bool | None = None

    def wait(self, timeout_s: float) -> bool:
        self._write("offsets")
        if timeout_s == supervision.FINISH_POLL_S:
            self.polls -= 1
            if self.polls == 0:
                self._write("commits")
        return False

    def stop(self, *, within_ms: int | None = None) -> None:
        self.had_committed = (self.live / "commits/1").exists()

    def commits(self) -> None:
        self._write("commits")

    def _write(self, log: str) -> None:
        (self.live / log / "1").write_text((self.live / log / "0").read_text())


@pytest.mark.parametrize(
    ("kind", "polls", "commits"),
    [(RequestKind.SUSPEND, 3, True), (RequestKind.SUSPEND, -1, False), (RequestKind.CANCEL, 3, False)],
)
def test_what_is_suspended_finishes_its_batch_if_that_is_short(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, kind: RequestKind, polls: int, commits: bool
) -> None:
    monkeypatch.setattr(supervision, "FINISH_BATCH_MS", 200)
    shelf.stream.catalog.requests.submit("orders", kind, origin="a test")
    query = InABatch(live=shelf.live, polls=polls)

    Stage(shelf.stream, [query]).run()

    assert query.had_committed is commits


def test_a_query_whose_batch_cannot_be_waited_for_is_stopped_all_the_same(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = InABatch(live=shelf.live, polls=-1)

    def breaks() -> None:
        raise ConnectionError("the bridge to the JVM broke")

    monkeypatch.setattr(supervision.Supervisor, "_finish_batch", lambda _self: breaks())
    shelf.stream.catalog.requests.submit("orders", RequestKind.SUSPEND, origin="a test")

    with pytest.raises(ConnectionError):
        Stage(shelf.stream, [query]).run()

    assert query.had_committed is False


@pytest.mark.parametrize(("kind", "status"), STOPS)
def test_a_stop_that_is_withdrawn_before_it_is_carried_out_stops_nothing(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, kind: RequestKind, status: ExecutionStatus
) -> None:
    withdrawn = withdrawn_just_before(shelf, "end", monkeypatch)
    request = shelf.stream.catalog.requests.submit("orders", kind, origin="a test")

    outcome = Stage(shelf.stream, [PlayedQuery()]).run(interrupted=lambda: bool(withdrawn))

    assert withdrawn == [request.request_id]
    assert outcome.end.kind is EndKind.INTERRUPTED


def test_a_stop_with_a_savepoint_that_is_withdrawn_before_its_batch_ends_stops_nothing(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "REQUEST_POLL_MS", 0)
    requests = shelf.stream.catalog.requests
    request_id = asked_to_stop(shelf)
    query = InABatch(live=shelf.live)

    def withdrawn() -> bool:
        if requests.get(request_id).status is RequestStatus.ACCEPTED and requests.withdraw(request_id):
            query.commits()
        # A later snapshot of the same query: it goes on.
        if requests.get(request_id).status is RequestStatus.WITHDRAWN:
            requests.submit("orders", RequestKind.SAVEPOINT, origin="a test", request_id="later")
            return requests.get("later").status is RequestStatus.COMPLETED
        return False

    play = Stage(shelf.stream, [query])
    outcome = play.run(interrupted=withdrawn)

    assert outcome.end.kind is EndKind.INTERRUPTED
    assert len(play.started_in) == 1
    [failed] = shelf.stream.catalog.snapshots.of_stream("orders", status=SnapshotStatus.FAILED)
    assert (failed.request_id, "was withdrawn" in (failed.failure_reason or "")) == (request_id, True)


def test_a_stop_that_is_withdrawn_once_its_savepoint_is_complete_starts_the_query_again(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    withdrawn = withdrawn_just_before(shelf, "end", monkeypatch)
    request_id = asked_to_stop(shelf)
    play = Stage(shelf.stream, [PlayedQuery(), PlayedQuery(ends=True)])

    outcome = play.run()

    assert withdrawn == [request_id]
    assert outcome.end.kind is EndKind.ENDED_BY_ITSELF
    assert [(status, cause) for status, cause, _ in play.ends()][1:] == [
        (ExecutionStatus.SUSPENDED, StartCause.MANUAL),
        (ExecutionStatus.SUSPENDED, StartCause.RESTART_IN_PLACE),
    ]


@pytest.mark.parametrize(("kind", "status"), STOPS)
def test_a_stop_that_is_withdrawn_while_the_stream_starts_lets_it_start(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, kind: RequestKind, status: ExecutionStatus
) -> None:
    monkeypatch.setattr(run_request, "REQUEST_POLL_MS", 0)
    withdrawn = withdrawn_just_before(shelf, "end", monkeypatch)
    request = shelf.stream.catalog.requests.submit("orders", kind, origin="a test")
    play = Stage(shelf.stream, [PlayedQuery(ends=True)])

    outcome = play.run()

    assert withdrawn == [request.request_id]
    assert outcome.end.kind is EndKind.ENDED_BY_ITSELF
    assert len(play.started_in) == 1


def test_a_stop_that_is_withdrawn_between_two_restarts_lets_it_restart(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    withdrawn = withdrawn_just_before(shelf, "stopped", monkeypatch)
    shelf.stream = replace(shelf.stream, restart=RestartStrategies.fixed_delay_restart(1, 0))
    requests: Any = shelf.stream.catalog.requests
    play = Stage(shelf.stream, [PlayedQuery(error="failure"), PlayedQuery(ends=True)])
    pending = requests.pending

    def asked_between(stream_id: str) -> Any:
        if play.reports and play.reports[-1].startswith("Restarting") and not withdrawn:
            requests.submit("orders", RequestKind.CANCEL, origin="a test")
        return pending(stream_id)

    monkeypatch.setattr(requests, "pending", asked_between)

    outcome = play.run()

    assert len(withdrawn) == 1
    assert outcome.end.kind is EndKind.ENDED_BY_ITSELF


def test_a_stop_with_a_savepoint_that_is_asked_for_during_a_start_is_refused_at_once(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for the first batch of the query, which a long restore puts off by hours."""
    monkeypatch.setattr(run_request, "REQUEST_POLL_MS", 0)
    requests: Any = shelf.stream.catalog.requests
    before, asked = asked_to_stop(shelf), list[str]()
    access = shelf.stream.store.check_access

    def ask_during_the_start() -> None:
        asked.append(asked_to_stop(shelf))
        access()

    monkeypatch.setattr(shelf.stream.store, "check_access", ask_during_the_start)

    outcome = Stage(shelf.stream, [PlayedQuery()]).run()

    refused = requests.get(asked[0])
    assert refused.status is RequestStatus.FAILED
    assert refused.error.startswith("NOT_ALL_REQUIRED_TASKS_RUNNING: Stream 'orders' is still starting")
    # One that waited for the stream to be started is carried out.
    assert requests.get(before).status is RequestStatus.COMPLETED
    assert outcome.end.kind is EndKind.FINISHED


def test_a_refusal_that_the_catalog_does_not_take_holds_nothing_up(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = shelf.stream.catalog.requests
    resolve, left = recorded.resolve, [1]

    def away_once(*args: Any, **how: Any) -> bool:
        if left:
            raise CatalogError(f"the database is away, {left.pop()}")
        return resolve(*args, **how)

    monkeypatch.setattr(recorded, "resolve", away_once)
    first, second = asked_to_stop(shelf), asked_to_stop(shelf)

    outcome = Stage(shelf.stream, [PlayedQuery()]).run()

    assert outcome.end.kind is EndKind.FINISHED
    assert recorded.get(first).status is RequestStatus.COMPLETED
    # There is one stop at a time.
    assert recorded.get(second).status is RequestStatus.FAILED


def test_what_nobody_waits_for_any_more_is_not_done_later(shelf: Shelf) -> None:
    def interrupted() -> str | None:
        raise KeyboardInterrupt

    request = shelf.stream.catalog.requests.get(asked_to_stop(shelf))
    with pytest.raises(KeyboardInterrupt):
        requests.await_answer(shelf.stream, request, timeout_s=60, abort_reason=interrupted)

    assert shelf.stream.catalog.requests.get(request.request_id).status is RequestStatus.WITHDRAWN


def test_what_somebody_else_has_taken_back_is_not_waited_for(shelf: Shelf) -> None:
    recorded = shelf.stream.catalog.requests
    request = recorded.get(asked_to_stop(shelf))
    recorded.withdraw(request.request_id)

    with pytest.raises(RequestFailedError, match="it was withdrawn"):
        requests.await_answer(shelf.stream, request, timeout_s=60)


def test_a_stop_whose_answer_from_the_catalog_was_lost_stops_the_query_all_the_same(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    play = stage(PlayedQuery())
    catalog = play.stream.catalog
    play.stream.register()
    request = catalog.requests.submit("orders", RequestKind.SUSPEND, origin="a test")
    end = catalog.executions.end

    def and_no_answer(*args: Any, **how: Any) -> None:
        monkeypatch.setattr(catalog.executions, "end", end)
        end(*args, **how)
        raise CatalogError("the connection was closed")

    monkeypatch.setattr(catalog.executions, "end", and_no_answer)
    since = monotonic_ms()

    outcome = play.run(interrupted=lambda: monotonic_ms() > since + 5_000)

    assert outcome.end.kind is EndKind.SUSPENDED
    assert catalog.requests.get(request.request_id).status is RequestStatus.COMPLETED
    assert play.ends() == [(ExecutionStatus.SUSPENDED, StartCause.MANUAL, True)]


def test_so_does_one_between_two_restarts(stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    play = stage(PlayedQuery(error="failure"), restart=RestartStrategies.fixed_delay_restart(5, 3_600_000))
    catalog = play.stream.catalog
    stopped = catalog.executions.stopped

    def and_no_answer(*args: Any, **how: Any) -> None:
        monkeypatch.setattr(catalog.executions, "stopped", stopped)
        stopped(*args, **how)
        raise CatalogError("the connection was closed")

    def ask_once() -> bool:
        if not asked and play.reports and "failure" in " ".join(play.reports):
            monkeypatch.setattr(catalog.executions, "stopped", and_no_answer)
            asked.append(catalog.requests.submit("orders", RequestKind.CANCEL, origin="a test").request_id)
            since.append(monotonic_ms())
        return bool(since) and monotonic_ms() > since[0] + 5_000

    asked: list[str] = []
    since: list[int] = []

    outcome = play.run(interrupted=ask_once)

    assert outcome.end.kind is EndKind.CANCEL_REQUESTED
    assert catalog.requests.get(asked[0]).status is RequestStatus.COMPLETED


TRIGGERS = [RequestKind.CHECKPOINT, RequestKind.SAVEPOINT, RequestKind.STOP_WITH_SAVEPOINT]


def accepted_by_the_dead(shelf: Shelf, kind: RequestKind) -> str:
    request = shelf.stream.catalog.requests.submit("orders", kind, origin="a test")
    assert as_writer(shelf.stream.catalog).requests.accept(request.request_id)
    return request.request_id


def answered(shelf: Shelf, request_id: str) -> Callable[[], bool]:
    """Whether a request is answered; also True after much longer than that takes."""
    since = monotonic_ms()

    def is_answered() -> bool:
        status = shelf.stream.catalog.requests.get(request_id).status
        return status in (RequestStatus.COMPLETED, RequestStatus.FAILED) or monotonic_ms() > since + 20_000

    return is_answered


@pytest.mark.parametrize("kind", TRIGGERS)
def test_what_a_process_accepted_before_it_died_is_carried_out_by_the_next_one(shelf: Shelf, kind: RequestKind) -> None:
    """It stayed ACCEPTED forever, and an upgrade that waited for it in STOPPING."""
    request_id = accepted_by_the_dead(shelf, kind)
    is_answered = answered(shelf, request_id)

    outcome = Stage(shelf.stream, [PlayedQuery()]).run(cause=StartCause.RESTART_NEW_RUN, interrupted=is_answered)

    request = shelf.stream.catalog.requests.get(request_id)
    assert request.status is RequestStatus.COMPLETED
    [taken] = shelf.stream.catalog.snapshots.completed("orders")
    assert request.snapshot_id == taken.snapshot_id
    is_stop = kind is RequestKind.STOP_WITH_SAVEPOINT
    assert outcome.end.kind is (EndKind.FINISHED if is_stop else EndKind.INTERRUPTED)


@pytest.mark.parametrize("kind", TRIGGERS)
def test_what_is_accepted_although_the_answer_of_the_catalog_was_lost_is_carried_out_once(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, kind: RequestKind
) -> None:
    monkeypatch.setattr(supervision, "REQUEST_POLL_MS", 0)
    requests: Any = shelf.stream.catalog.requests
    request_id = requests.submit("orders", kind, origin="a test").request_id
    accept = requests.accept

    def and_no_answer(*args: Any) -> None:
        monkeypatch.setattr(requests, "accept", accept)
        accept(*args)
        raise CatalogError("the connection was closed")

    monkeypatch.setattr(requests, "accept", and_no_answer)

    Stage(shelf.stream, [PlayedQuery()]).run(interrupted=answered(shelf, request_id))

    assert requests.get(request_id).status is RequestStatus.COMPLETED
    assert len(shelf.stream.catalog.snapshots.of_stream("orders")) == 1


def recorded_by_the_dead(shelf: Shelf, kind: RequestKind) -> tuple[str, str]:
    """A request whose savepoint is recorded, and which is not answered."""
    request_id, savepoint = accepted_by_the_dead(shelf, kind), shelf.savepoint("before")
    with shelf.stream.catalog.database.writing() as connection:
        of_request = snapshots.update().where(snapshots.c.snapshot_id == savepoint.snapshot_id)
        connection.execute(of_request.values(request_id=request_id))
    return request_id, savepoint.snapshot_id


@pytest.mark.parametrize("kind", [RequestKind.SAVEPOINT, RequestKind.STOP_WITH_SAVEPOINT])
def test_what_a_process_carried_out_before_it_died_is_only_answered(shelf: Shelf, kind: RequestKind) -> None:
    request_id, savepoint = recorded_by_the_dead(shelf, kind)
    as_writer(shelf.stream.catalog).executions.end("first", ExecutionStatus.FINISHED, "stopped with a savepoint")

    outcome = Stage(shelf.stream, [PlayedQuery()]).run(interrupted=answered(shelf, request_id))

    request = shelf.stream.catalog.requests.get(request_id)
    assert (request.status, request.snapshot_id) == (RequestStatus.COMPLETED, savepoint)
    assert [each.snapshot_id for each in shelf.stream.catalog.snapshots.of_stream("orders")] == [savepoint]
    assert outcome.end.kind is EndKind.INTERRUPTED


def test_a_stop_after_whose_savepoint_the_stream_was_restarted_stops_it(shelf: Shelf) -> None:
    request_id, savepoint = recorded_by_the_dead(shelf, RequestKind.STOP_WITH_SAVEPOINT)

    outcome = Stage(shelf.stream, [PlayedQuery()]).run(
        cause=StartCause.RESTART_NEW_RUN, interrupted=answered(shelf, request_id)
    )

    assert outcome.end.kind is EndKind.FINISHED
    assert shelf.stream.catalog.requests.get(request_id).snapshot_id not in (None, savepoint)


def test_what_is_not_answered_when_a_query_fails_is_carried_out_by_its_restart_in_place(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.stream = replace(shelf.stream, restart=RestartStrategies.fixed_delay_restart(1, 0))
    catalog: Any = shelf.stream.catalog
    request_id = asked_to_stop(shelf)
    failing, play = PlayedQuery(), Stage(shelf.stream, [])
    play.queries = [failing, PlayedQuery()]
    accept, resolve = catalog.requests.accept, catalog.requests.resolve

    def and_fail(*args: Any) -> bool:
        failing.error = "boom"
        return bool(accept(*args))

    def away_at_first(*args: Any, **how: Any) -> bool:
        if len(play.started_in) == 1:
            raise CatalogError("the database is away")
        return bool(resolve(*args, **how))

    def no_boundary(_runner: object, _running: object) -> bool:
        return len(play.started_in) == 2

    monkeypatch.setattr(AttemptRunner, "_at_boundary", no_boundary)
    monkeypatch.setattr(catalog.requests, "accept", and_fail)
    monkeypatch.setattr(catalog.requests, "resolve", away_at_first)

    outcome = play.run(interrupted=answered(shelf, request_id))

    assert (len(play.started_in), outcome.end.kind) == (2, EndKind.FINISHED)
    assert catalog.requests.get(request_id).status is RequestStatus.COMPLETED
