"""The lease of a run: a start that loses it, and a query that does not stop."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.errors import (
    CatalogError,
    LeaseLostError,
    QueryStopError,
)
from dagster_ckpt.runtime import start as starting
from dagster_ckpt.runtime.checkpoint_attempts import AttemptRunner
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import RunRequest
from tests.support.played_query import PlayedQuery, Stage
from tests.support.retention_shelf import HOLDER, Shelf


def away(*_args: Any, **_how: Any) -> None:
    raise CatalogError("the database is away")


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


@pytest.mark.parametrize(("room", "method"), [("executions", "running"), ("requests", "resolve")])
def test_a_query_that_cannot_be_recorded_is_stopped(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, room: str, method: str
) -> None:
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
        leases.acquire("orders", replace(HOLDER, host="another-machine"), 60_000, take_over=held)

    monkeypatch.setattr(starting, "log_message", take_over)
    play = Stage(shelf.stream, [PlayedQuery()])

    with pytest.raises(LeaseLostError, match="another-machine"):
        execute_stream(shelf.stream, RunRequest(run_id="run", start_query=play.start_query))

    assert play.started_in == []


class Stubborn(PlayedQuery):
    def stop(self, *, within_ms: int | None = None) -> None:
        raise QueryStopError("it still runs")


def test_a_query_that_does_not_stop_keeps_its_lease(shelf: Shelf) -> None:
    play = Stage(shelf.stream, [Stubborn()])

    with pytest.raises(QueryStopError):
        play.run(interrupted=lambda: bool(play.started_in))

    lease = shelf.stream.catalog.leases.current("orders")
    assert lease is not None
    assert lease.run_id == "run"


def test_a_catalog_that_is_away_then_does_not_hide_that_it_still_runs(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease was released, so that a second query started beside it in the same directory."""
    play = Stage(shelf.stream, [Stubborn()])
    monkeypatch.setattr(shelf.stream.catalog.executions, "end", away)

    with pytest.raises(QueryStopError):
        play.run(interrupted=lambda: bool(play.started_in))

    assert shelf.stream.catalog.leases.current("orders") is not None


def test_so_does_an_error_that_follows_when_its_attempts_end(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Stage(shelf.stream, [Stubborn()])
    monkeypatch.setattr(AttemptRunner, "close", away)

    with pytest.raises(CatalogError, match="away"):
        play.run(interrupted=lambda: bool(play.started_in))

    assert shelf.stream.catalog.leases.current("orders") is not None


def test_one_whose_jvm_has_ended_gives_it_back(shelf: Shelf) -> None:
    """A bridge that is broken because its JVM was killed: nothing writes any more."""
    jvm = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    class Killed(PlayedQuery):
        def stop(self, *, within_ms: int | None = None) -> None:
            jvm.kill()
            jvm.wait()
            raise QueryStopError("the answer was lost")

    play = Stage(shelf.stream, [Killed()])
    with pytest.raises(QueryStopError):
        play.run(interrupted=lambda: bool(play.started_in), jvm_pid=jvm.pid)

    assert shelf.stream.catalog.leases.current("orders") is None
    assert jvm.stdin is not None
    jvm.stdin.close()
