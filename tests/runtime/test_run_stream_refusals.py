"""Runs whose query cannot start, fails, or is told to stop: a query played by the test, everything else real."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import Mock

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionStatus, RequestKind, RequestStatus, SnapshotStatus, StartCause
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.errors import (
    CatalogError,
    LeaseHeldError,
    LeaseLostError,
    LiveDirectoryError,
    NothingCommittedError,
    QueryStopError,
    RequestFailedError,
    RestartWithdrawnError,
    SharedSinkError,
    StorageAccessError,
)
from dagster_ckpt.operations import lifecycle, requests, snapshots
from dagster_ckpt.policies.restart_strategies import RestartStrategies
from dagster_ckpt.runtime import start as starting
from dagster_ckpt.runtime import supervision
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run import EndKind, RunRequest
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.description import NamedOutput
from dagster_ckpt.stream.handle import StreamHandle, monotonic_ms
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.as_writer import as_writer
from tests.support.played_query import PlayedQuery, Stage
from tests.support.retention_shelf import HOLDER, Shelf

ORIGIN = "a test"


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    catalog = Catalog(f"sqlite:///{tmp_path / 'catalog.db'}")

    def make(*queries: PlayedQuery | Exception, restart: Any = None) -> Stage:
        stream = StreamHandle(
            stream_id="orders",
            name="orders",
            asset_key="orders",
            catalog=catalog,
            store=open_store(FileSystemCheckpointStorage(f"file://{tmp_path}/snapshots"), "orders"),
            options=CheckpointConfig().options,
            restart=restart or RestartStrategies.no_restart(),
            live_root=str(tmp_path / "live"),
        )
        return Stage(stream, list(queries))

    yield make
    catalog.close()


def test_a_first_query_that_cannot_start_does_not_block_the_next_start(stage: Callable[..., Stage]) -> None:
    play = stage(ValueError("no such column"), ValueError("no such column"), PlayedQuery(ends=True))

    for _ in range(2):
        with pytest.raises(ValueError, match="no such column"):
            play.run()
    outcome = play.run()

    assert outcome.end.kind is EndKind.ENDED_BY_ITSELF
    assert [status for status, _, _ in play.ends()] == [
        ExecutionStatus.FAILED,
        ExecutionStatus.FAILED,
        ExecutionStatus.SUSPENDED,
    ]
    assert play.stream.catalog.leases.current("orders") is None


def test_a_failed_query_is_restarted_in_place_as_often_as_its_strategy_says(stage: Callable[..., Stage]) -> None:
    failing = [PlayedQuery(error=f"failure {number}") for number in (1, 2, 3)]
    play = stage(*failing, restart=RestartStrategies.fixed_delay_restart(2, 0))

    outcome = play.run()

    assert outcome.end.kind is EndKind.FAILED
    assert outcome.end.reason == "failure 3"
    assert [(status, cause) for status, cause, _ in play.ends()] == [
        (ExecutionStatus.FAILED, StartCause.MANUAL),
        (ExecutionStatus.FAILED, StartCause.RESTART_IN_PLACE),
        (ExecutionStatus.FAILED, StartCause.RESTART_IN_PLACE),
    ]
    assert [settled for _, _, settled in play.ends()] == [True, True, False]
    assert all(query.stopped for query in failing)


def test_a_query_that_ends_before_it_reports_anything_keeps_the_sinks_that_were_named_at_its_start(
    stage: Callable[..., Stage],
) -> None:
    play = stage(PlayedQuery(ends=True))
    start, catalog = play.start_query, play.stream.catalog

    def noted_then_started(live: LiveDirectory) -> Any:
        [execution] = catalog.executions.of_stream("orders")
        lease = catalog.leases.current("orders")
        assert lease is not None
        catalog.executions.heartbeat(lease, execution.execution_id, {"sinks": ["FileSink[/out]"]})
        return start(live)

    outcome = execute_stream(play.stream, RunRequest(run_id="run", start_query=noted_then_started))

    assert outcome.end.kind is EndKind.ENDED_BY_ITSELF
    assert catalog.executions.last_sinks("orders") == ["FileSink[/out]"]


def test_an_interrupt_ends_the_wait_for_a_restart(stage: Callable[..., Stage]) -> None:
    play = stage(PlayedQuery(error="failure"), restart=RestartStrategies.fixed_delay_restart(5, 3_600_000))

    outcome = play.run(interrupted=lambda: bool(play.reports) and "failure" in " ".join(play.reports))

    assert outcome.end.kind is EndKind.INTERRUPTED
    assert len(play.started_in) == 1


def test_an_interrupted_query_is_stopped_and_left_for_its_caller_to_settle(stage: Callable[..., Stage]) -> None:
    query = PlayedQuery()
    play = stage(query)

    outcome = play.run(interrupted=lambda: bool(play.started_in))

    assert outcome.end.kind is EndKind.INTERRUPTED
    assert query.stopped
    assert play.ends() == [(ExecutionStatus.RUNNING, StartCause.MANUAL, False)]
    assert play.stream.catalog.leases.current("orders") is None


def test_a_start_that_is_refused_is_over_and_its_request_is_answered(stage: Callable[..., Stage]) -> None:
    play = stage()
    play.stream.register()
    request = play.stream.catalog.requests.submit("orders", RequestKind.START, origin="a test")

    with pytest.raises(Exception, match="chk-9"):
        play.run(start_from=StartFrom.parse("chk-9"), start_request_id=request.request_id)

    answer = play.stream.catalog.requests.get(request.request_id)
    assert answer.status is RequestStatus.FAILED
    assert "no snapshot named 'chk-9'" in (answer.error or "")
    assert play.ends() == [(ExecutionStatus.FAILED, StartCause.MANUAL, True)]
    assert play.started_in == []
    assert play.stream.catalog.leases.current("orders") is None


def test_a_storage_that_cannot_be_written_stops_a_start_before_anything_is_made(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    play = stage(PlayedQuery(ends=True))
    (tmp_path / "snapshots").write_text("a file where the folder should be")

    with pytest.raises(StorageAccessError, match="snapshots"):
        play.run()

    assert play.started_in == []
    assert not (tmp_path / "live").exists()
    assert play.stream.catalog.streams.get("orders").live_directory is None

    (tmp_path / "snapshots").unlink()
    assert play.run().end.kind is EndKind.ENDED_BY_ITSELF


def test_a_second_run_is_refused_while_one_is_alive(stage: Callable[..., Stage]) -> None:
    play = stage(PlayedQuery())
    refused: list[LeaseHeldError] = []

    def start_another() -> bool:
        if not play.started_in:
            return False
        with pytest.raises(LeaseHeldError) as refusal:
            execute_stream(play.stream, RunRequest(run_id="second", start_query=play.start_query))
        refused.append(refusal.value)
        return True

    play.run(interrupted=start_another)

    assert "run run " in str(refused[0])
    assert len(play.started_in) == len(play.ends()) == 1


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
        snapshots.trigger_savepoint(play.stream, origin=ORIGIN)

    assert play.stream.catalog.snapshots.of_stream("orders") == []


@pytest.mark.parametrize(
    "ask", [lifecycle.stop_with_savepoint, lifecycle.cancel, lifecycle.suspend, snapshots.trigger_checkpoint]
)
def test_what_only_a_running_stream_can_do_is_refused_of_one_that_does_not_run(
    stage: Callable[..., Stage], ask: Callable[..., object]
) -> None:
    play = stage()
    play.stream.register()

    with pytest.raises(RequestFailedError, match="is not running"):
        ask(play.stream, origin=ORIGIN)

    assert play.stream.catalog.requests.pending("orders") == []


def test_a_start_after_a_lost_lease_goes_on_in_a_fresh_directory(tmp_path: Path) -> None:
    shelf = Shelf.at(tmp_path)
    # Of a process on another machine nothing is ever proven; its lease has just run out.
    shelf.stream.catalog.leases.acquire("orders", replace(HOLDER, host="another-machine"), 0)
    play = Stage(shelf.stream, [PlayedQuery(ends=True)])

    play.run()

    assert play.started_in == [shelf.stream.live_directory(2, 4).url]
    assert (shelf.live / "commits" / "0").exists()
    assert (tmp_path / "live" / "orders" / "live-2-4" / "commits" / "0").exists()
    shelf.stream.catalog.close()


@pytest.mark.parametrize("start_from", ["latest", "latest-checkpoint"])
def test_a_live_directory_that_the_catalog_has_never_heard_of_is_not_cleared(tmp_path: Path, start_from: str) -> None:
    shelf = Shelf.at(tmp_path)
    shelf.stream.catalog.close()
    elsewhere = replace(shelf.stream, catalog=Catalog(f"sqlite:///{tmp_path / 'another.db'}"))
    play = Stage(elsewhere, [PlayedQuery(ends=True)])

    with pytest.raises(LiveDirectoryError, match=r"live-1-0, up to batch 0\n.*rebuild_catalog"):
        play.run(start_from=StartFrom.parse(start_from))

    assert play.started_in == []
    assert (shelf.live / "commits" / "0").exists()

    play.run(start_from=StartFrom.parse("empty", discard_state=True))

    # Not in its place: what another catalog may still be using is deleted by no start.
    assert play.started_in == [elsewhere.live_directory(2, 2).url]
    assert (shelf.live / "commits" / "0").exists()
    elsewhere.catalog.close()


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    """A stream that has run before, so that it may be asked for snapshots at once."""
    shelf = Shelf.at(tmp_path)
    as_writer(shelf.stream.catalog).executions.heartbeat("first", {"batch_id": 0, "sinks": ["ConsoleSink"]})
    yield shelf
    shelf.stream.catalog.close()


def asked_to_stop(shelf: Shelf) -> str:
    request = shelf.stream.catalog.requests.submit("orders", RequestKind.STOP_WITH_SAVEPOINT, origin="a test")
    return request.request_id


def test_a_stop_whose_savepoint_is_complete_only_after_its_time_has_failed_and_the_query_goes_on(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = shelf.stream.store.write_savepoint
    passed_ms = [0]

    def late(*args: Any, should_abort: Callable[[], bool], **how: Any) -> Any:
        passed_ms[0] = shelf.stream.options.timeout_ms
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
    assert shelf.stream.catalog.requests.get(request_id).status is RequestStatus.FAILED


def test_a_stop_with_a_savepoint_is_answered_once_a_kill_could_not_bring_the_stream_back(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = shelf.stream.catalog
    resolve, recorded = catalog.requests.resolve, []

    def tell(*args: Any, **how: Any) -> bool:
        recorded.append([(each.status, each.settled) for each in catalog.executions.of_stream("orders", limit=1)])
        return resolve(*args, **how)

    monkeypatch.setattr(catalog.requests, "resolve", tell)
    asked_to_stop(shelf)

    Stage(shelf.stream, [PlayedQuery()]).run()

    assert recorded == [[(ExecutionStatus.FINISHED, False)]]


STOPS = [(RequestKind.CANCEL, ExecutionStatus.CANCELED), (RequestKind.SUSPEND, ExecutionStatus.SUSPENDED)]


@pytest.mark.parametrize(("kind", "status"), STOPS)
def test_a_stop_is_answered_and_recorded_together_or_not_at_all(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, kind: RequestKind, status: ExecutionStatus
) -> None:
    catalog, answers = shelf.stream.catalog, []
    executions: Any = catalog.executions
    end = executions._end

    def broken(*_args: Any, **_how: Any) -> None:
        executions._end = end
        answers.append(catalog.requests.get(request.request_id).status)
        raise CatalogError("the connection broke")

    request = catalog.requests.submit("orders", kind, origin="a test")
    monkeypatch.setattr(executions, "_end", broken)

    def look() -> bool:
        answers.append(catalog.requests.get(request.request_id).status)
        return False

    Stage(shelf.stream, [PlayedQuery()]).run(interrupted=look)

    assert set(answers) == {RequestStatus.PENDING}
    assert catalog.requests.get(request.request_id).status is RequestStatus.COMPLETED
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


@pytest.mark.parametrize(("kind", "status"), STOPS)
def test_a_stop_that_is_withdrawn_before_it_is_carried_out_stops_nothing(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, kind: RequestKind, status: ExecutionStatus
) -> None:
    withdrawn = withdrawn_just_before(shelf, "end", monkeypatch)
    request = shelf.stream.catalog.requests.submit("orders", kind, origin="a test")

    outcome = Stage(shelf.stream, [PlayedQuery()]).run(interrupted=lambda: bool(withdrawn))

    assert withdrawn == [request.request_id]
    assert outcome.end.kind is EndKind.INTERRUPTED


@pytest.mark.parametrize(("kind", "status"), STOPS)
def test_a_stop_that_is_withdrawn_while_the_stream_starts_lets_it_start(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, kind: RequestKind, status: ExecutionStatus
) -> None:
    monkeypatch.setattr(starting, "REQUEST_POLL_MS", 0)
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
    monkeypatch.setattr(starting, "REQUEST_POLL_MS", 0)
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


@pytest.mark.parametrize("is_done", [True, False], ids=["recorded", "not recorded"])
def test_a_savepoint_of_a_stopped_stream_is_in_the_catalog_or_not_at_all(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    records = shelf.stream.catalog.snapshots
    complete = records.complete_of_stopped

    def cut_off(*args: Any, **facts: Any) -> None:
        if is_done:
            complete(*args, **facts)
        raise CatalogError("the connection broke")

    monkeypatch.setattr(records, "complete_of_stopped", cut_off)

    if is_done:
        assert snapshots.trigger_savepoint(shelf.stream, origin=ORIGIN).status is SnapshotStatus.COMPLETED
        return
    with pytest.raises(CatalogError, match="the connection broke"):
        snapshots.trigger_savepoint(shelf.stream, origin=ORIGIN)
    assert [snapshot.status for snapshot in records.of_stream("orders")] == [SnapshotStatus.FAILED]
    assert list((shelf.root / "savepoints").rglob("_metadata")) == []


def test_a_savepoint_of_a_stopped_stream_that_is_interrupted_is_not_under_way_for_ever(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_args: Any, **_how: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shelf.stream.store, "write_savepoint", interrupted)

    with pytest.raises(KeyboardInterrupt):
        snapshots.trigger_savepoint(shelf.stream, origin=ORIGIN)

    [snapshot] = shelf.stream.catalog.snapshots.of_stream("orders")
    assert (snapshot.status, snapshot.failure_reason) == (SnapshotStatus.FAILED, "KeyboardInterrupt")


@pytest.mark.parametrize(("room", "method"), [("executions", "running"), ("requests", "resolve")])
def test_a_query_that_cannot_be_recorded_is_stopped(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, room: str, method: str
) -> None:
    def away(*_args: Any, **_how: Any) -> None:
        raise CatalogError("the database is away")

    monkeypatch.setattr(getattr(shelf.stream.catalog, room), method, away)
    query = PlayedQuery()

    with pytest.raises(CatalogError, match="away"):
        Stage(shelf.stream, [query]).run(start_request_id="asked")

    assert query.stopped


def test_a_start_that_took_longer_than_its_lease_starts_nothing(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = shelf.stream.catalog.leases

    def take_over(_stream_id: str, _message: str) -> None:
        held = leases.current("orders")
        assert held is not None
        leases.acquire("orders", replace(HOLDER, host="another-machine"), 60_000, take_over=held.token)

    monkeypatch.setattr(starting, "log_message", take_over)
    play = Stage(shelf.stream, [PlayedQuery()])

    with pytest.raises(LeaseLostError, match="another-machine"):
        execute_stream(shelf.stream, RunRequest(run_id="run", start_query=play.start_query))

    assert play.started_in == []


def test_a_query_that_does_not_stop_keeps_its_lease(shelf: Shelf) -> None:
    class Stubborn(PlayedQuery):
        def stop(self, *, within_ms: int | None = None) -> None:
            raise QueryStopError("it still runs")

    play = Stage(shelf.stream, [Stubborn()])

    with pytest.raises(QueryStopError):
        play.run(interrupted=lambda: bool(play.started_in))

    lease = shelf.stream.catalog.leases.current("orders")
    assert lease is not None
    assert lease.run_id == "run"


def test_one_whose_jvm_has_ended_gives_it_back(shelf: Shelf) -> None:
    """A bridge that is broken because its JVM was killed: nothing writes any more."""
    jvm = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    class Stubborn(PlayedQuery):
        def stop(self, *, within_ms: int | None = None) -> None:
            jvm.kill()
            jvm.wait()
            raise QueryStopError("the answer was lost")

    play = Stage(shelf.stream, [Stubborn()])
    with pytest.raises(QueryStopError):
        play.run(interrupted=lambda: bool(play.started_in), jvm_pid=jvm.pid)

    assert shelf.stream.catalog.leases.current("orders") is None
    assert jvm.stdin is not None
    jvm.stdin.close()


def test_a_start_that_was_taken_back_is_not_made_by_the_run_that_was_launched_for_it(
    stage: Callable[..., Stage],
) -> None:
    play = stage(PlayedQuery(ends=True))
    play.stream.register()
    request = play.stream.catalog.requests.submit("orders", RequestKind.START, origin="a test")
    play.stream.catalog.requests.withdraw(request.request_id)

    with pytest.raises(RestartWithdrawnError, match="was withdrawn"):
        play.run(start_request_id=request.request_id)

    assert (play.started_in, play.ends()) == ([], [])


class TestTwoStreamsThatNameOneFolder:
    """Neither has written there yet, so no log says whose it is: each would pass over the other's batches."""

    @pytest.fixture
    def streams(
        self, stage: Callable[..., Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> tuple[Stage, Stage]:
        outputs = iter(["out", "link/out"])
        (tmp_path / "link").symlink_to(tmp_path)
        monkeypatch.setattr(starting, "plan_of_writer", lambda _writer: None)
        monkeypatch.setattr(
            starting, "named_output", lambda _writer: NamedOutput("parquet", f"{tmp_path}/{next(outputs)}")
        )
        one = stage(PlayedQuery())
        other = stage(PlayedQuery())
        other.stream = replace(other.stream, stream_id="payments", name="payments", asset_key="payments")
        return one, other

    def test_the_second_is_refused_while_the_first_runs(self, streams: tuple[Stage, Stage]) -> None:
        one, other = streams
        refused = False

        def start_the_other() -> bool:
            nonlocal refused
            with pytest.raises(SharedSinkError, match="stream 'orders' writes"):
                other.run(describe=Mock(), interrupted=lambda: bool(other.started_in))
            refused = True
            return True

        one.run(describe=Mock(), interrupted=start_the_other)

        assert refused
        assert other.started_in == []

    def test_two_that_start_at_the_same_moment_do_not_both_run(
        self, streams: tuple[Stage, Stage], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one, other = streams
        prepare, started, stop = starting.prepare, Event(), Event()
        start_other = other.start_query

        def tell(live: LiveDirectory) -> Any:
            started.set()
            return start_other(live)

        request = RunRequest("second", tell, describe=Mock(), interrupted=stop.is_set)
        second = Thread(target=execute_stream, args=(other.stream, request))

        def and_then_the_other(*what: Any, **how: Any) -> Any:
            monkeypatch.setattr(starting, "prepare", prepare)
            # It has looked, and not yet said where it is about to write.
            second.start()
            assert started.wait(30)
            return prepare(*what, **how)

        monkeypatch.setattr(starting, "prepare", and_then_the_other)
        try:
            with pytest.raises(SharedSinkError, match="stream 'payments' writes"):
                one.run(describe=Mock(), interrupted=lambda: bool(one.started_in))
        finally:
            stop.set()
            second.join()

        assert one.started_in == []


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
