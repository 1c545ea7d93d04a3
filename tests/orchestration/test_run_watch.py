"""A stream notices by itself that it is to stop, where no signal reaches it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import dagster as dg
import psutil
import pytest
from dagster import DagsterRunStatus
from dagster._core.events import EngineEventData

from dagster_ckpt.orchestration.run_status import LOOK_EVERY_MS, RunWatch

ENDS = [DagsterRunStatus.CANCELING, DagsterRunStatus.CANCELED, DagsterRunStatus.FAILURE, DagsterRunStatus.SUCCESS]


class Watched:
    """A run, the watch of its stream, and the time."""

    def __init__(self, instance: dg.DagsterInstance, worker_pid: int | None = None) -> None:
        self.instance = instance
        self.run = instance.add_run(dg.DagsterRun("orders_stream", status=DagsterRunStatus.STARTED))
        if worker_pid is not None:
            event = EngineEventData({"pid": dg.MetadataValue.text(str(worker_pid))})
            instance.report_engine_event("Started process for run", self.run, event)
        self.now_ms = 0
        self.signalled = False
        self.watch = RunWatch(instance, self.run.run_id, signalled=lambda: self.signalled, clock=lambda: self.now_ms)

    def record(self, status: DagsterRunStatus) -> None:
        """Dagster records something for the run, which a later look sees."""
        self.instance.run_storage.handle_run_event(
            self.run.run_id, dg.DagsterEvent(_EVENTS[status].value, job_name="orders_stream")
        )
        self.now_ms += LOOK_EVERY_MS


_EVENTS = {
    DagsterRunStatus.CANCELING: dg.DagsterEventType.RUN_CANCELING,
    DagsterRunStatus.CANCELED: dg.DagsterEventType.RUN_CANCELED,
    DagsterRunStatus.FAILURE: dg.DagsterEventType.RUN_FAILURE,
    DagsterRunStatus.SUCCESS: dg.DagsterEventType.RUN_SUCCESS,
}


@pytest.fixture
def watched(instance: dg.DagsterInstance) -> Watched:
    return Watched(instance)


@pytest.fixture
def child() -> Iterator[psutil.Process]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def test_a_run_that_goes_on_is_no_reason_to_stop(watched: Watched) -> None:
    watched.now_ms += LOOK_EVERY_MS

    assert not watched.watch.should_stop()
    assert watched.watch.reason is None


def test_a_signal_is(watched: Watched) -> None:
    watched.signalled = True

    assert watched.watch.should_stop()
    assert watched.watch.reason == "a signal"


@pytest.mark.parametrize("status", ENDS)
def test_so_is_what_is_recorded_of_the_run_where_the_signal_got_lost(
    watched: Watched, status: DagsterRunStatus
) -> None:
    watched.record(status)

    assert watched.watch.should_stop()
    assert "its run is" in (watched.watch.reason or "")


def test_so_is_a_run_that_was_deleted(watched: Watched) -> None:
    watched.instance.delete_run(watched.run.run_id)
    watched.now_ms += LOOK_EVERY_MS

    assert watched.watch.should_stop()


def test_dagsters_database_is_asked_every_few_seconds_only(watched: Watched) -> None:
    watched.record(DagsterRunStatus.CANCELED)
    watched.now_ms -= 1

    assert not watched.watch.should_stop()


def test_a_database_that_is_away_does_not_end_a_stream(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_run_id: str) -> None:
        raise ConnectionError

    monkeypatch.setattr(watched.instance, "get_run_by_id", away)
    watched.now_ms += LOOK_EVERY_MS

    assert not watched.watch.should_stop()


def test_a_step_whose_run_worker_was_killed_stops(
    instance: dg.DagsterInstance, child: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getppid", lambda: child.pid)
    watched = Watched(instance, child.pid)
    assert not watched.watch.should_stop()

    child.kill()
    child.wait()

    assert watched.watch.should_stop()
    assert watched.watch.reason == f"the process of its run, {child.pid}, has ended"


@pytest.mark.parametrize("step_s", [1, -1, 3600])
def test_a_step_of_the_clock_stops_no_stream(
    instance: dg.DagsterInstance, child: psutil.Process, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    monkeypatch.setattr(os, "getppid", lambda: child.pid)
    watched = Watched(instance, child.pid)
    before = psutil.boot_time()

    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: before + step_s)

    assert not watched.watch.should_stop()


@pytest.mark.parametrize("worker_pid", [os.getpid(), 1, None], ids=["itself", "another", "none"])
def test_a_parent_that_is_not_the_runs_process_may_go(
    instance: dg.DagsterInstance, child: psutil.Process, monkeypatch: pytest.MonkeyPatch, worker_pid: int | None
) -> None:
    monkeypatch.setattr(os, "getppid", lambda: child.pid)
    watched = Watched(instance, worker_pid)

    child.kill()
    child.wait()

    assert not watched.watch.should_stop()
