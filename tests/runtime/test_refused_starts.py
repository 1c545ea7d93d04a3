"""Starts that are refused: what they leave behind, and that the next start is not blocked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import Mock

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionStatus, RequestKind, RequestStatus, StartCause
from dagster_ckpt.errors import (
    LeaseHeldError,
    LiveDirectoryError,
    RestartWithdrawnError,
    SharedSinkError,
    StorageAccessError,
)
from dagster_ckpt.runtime import start as starting
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import EndKind, RunRequest
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.as_writer import as_writer
from tests.support.played_query import PlayedQuery, Stage
from tests.support.retention_shelf import HOLDER, Shelf


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


def test_a_start_that_is_refused_is_over_and_its_request_is_answered(stage: Callable[..., Stage]) -> None:
    play = stage()
    play.stream.register()
    request = play.stream.catalog.requests.submit("orders", RequestKind.START, origin="a test")

    with pytest.raises(Exception, match="chk-9"):
        play.run(start_from=StartFrom("chk-9"), start_request_id=request.request_id)

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


@pytest.mark.parametrize("start_from", ["latest", "latest-checkpoint"])
def test_a_live_directory_that_the_catalog_has_never_heard_of_is_not_cleared(tmp_path: Path, start_from: str) -> None:
    shelf = Shelf.at(tmp_path)
    shelf.stream.catalog.close()
    elsewhere = replace(shelf.stream, catalog=Catalog(f"sqlite:///{tmp_path / 'another.db'}"))
    play = Stage(elsewhere, [PlayedQuery(ends=True)])

    with pytest.raises(LiveDirectoryError, match=r"live-1-0, up to batch 0\n.*rebuild_catalog"):
        play.run(start_from=StartFrom(start_from))

    assert play.started_in == []
    assert (shelf.live / "commits" / "0").exists()

    play.run(start_from=StartFrom("empty", discard_state=True))

    # Not in its place: what another catalog may still be using is deleted by no start.
    assert play.started_in == [elsewhere.live_directory(2, 2).url]
    assert (shelf.live / "commits" / "0").exists()
    elsewhere.catalog.close()


@pytest.mark.parametrize(("origin", "shown"), [("desired state", "DESIRED_STATE"), ("ann", "MANUAL")])
def test_a_start_for_the_desired_state_is_not_shown_as_one_by_hand(
    stage: Callable[..., Stage], origin: str, shown: str
) -> None:
    play = stage(PlayedQuery(ends=True))
    play.stream.register()
    request = play.stream.catalog.requests.submit("orders", RequestKind.START, origin=origin)
    play.run(start_request_id=request.request_id)
    [execution] = play.stream.catalog.executions.of_stream("orders")
    assert (execution.shown_cause, execution.cause) == (shown, StartCause.MANUAL)


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


class TestStartThatWasAnswered:
    """A process that reads its start request may begin minutes later, once it has checked its code."""

    def asked(self, play: Stage) -> str:
        play.stream.register()
        return play.stream.catalog.requests.submit("orders", RequestKind.START, origin="a test").request_id

    def test_it_is_not_carried_out_if_its_request_failed_before_it_had_the_lease(
        self, stage: Callable[..., Stage]
    ) -> None:
        play = stage(PlayedQuery(ends=True))
        request_id = self.asked(play)
        assert play.stream.catalog.requests.give_up_start(request_id, "its run was killed")

        with pytest.raises(RestartWithdrawnError, match="a test was answered FAILED: its run was killed"):
            play.run(start_request_id=request_id)

        assert (play.started_in, play.ends()) == ([], [])

    @pytest.mark.parametrize("status", [RequestStatus.FAILED, RequestStatus.COMPLETED])
    def test_a_run_that_is_executed_again_starts_the_stream(
        self, stage: Callable[..., Stage], status: RequestStatus
    ) -> None:
        play = stage(PlayedQuery(ends=True))
        request_id = self.asked(play)
        as_writer(play.stream.catalog).requests.resolve(request_id, status)

        play.run(start_request_id=request_id, start_was_answered=True)

        assert len(play.started_in) == 1

    def test_one_that_is_under_way_is_answered_by_its_own_process_only(self, stage: Callable[..., Stage]) -> None:
        play = stage(PlayedQuery(ends=True))
        request_id = self.asked(play)
        requests, others = play.stream.catalog.requests, []

        def meanwhile() -> None:
            others.append((requests.fail_start(request_id, "refused"), requests.give_up_start(request_id, "gone")))
            others.append((requests.is_taken(request_id), requests.get(request_id).status))

        play.queries = [PlayedQuery(ends=True, before=meanwhile)]
        play.run(start_request_id=request_id)

        assert others == [(False, False), (True, RequestStatus.PENDING)]
        assert requests.get(request_id).status is RequestStatus.COMPLETED

    def test_one_whose_process_has_lost_its_lease_is_given_up_or_begun_again(self, stage: Callable[..., Stage]) -> None:
        play = stage()
        request_id = self.asked(play)
        catalog = play.stream.catalog
        for again in (catalog.requests.take_start, lambda *_: catalog.requests.give_up_start(request_id, "it died")):
            lease = catalog.leases.acquire("orders", HOLDER, 60_000)
            assert catalog.requests.take_start(lease, request_id)
            catalog.leases.release(lease)
            assert not catalog.requests.is_taken(request_id)
            lease = catalog.leases.acquire("orders", HOLDER, 60_000)
            assert again(lease, request_id)
            catalog.leases.release(lease)


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
