"""A hand-over is killed before each change of the old and of the new process: exactly one goes on, with every row once.

The queries are played; planning, requests, leases, fencing and the files of live directory and sink are real.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import text

from dagster_ckpt.catalog.database import Database
from dagster_ckpt.catalog.desired_states import PreflightRecord
from dagster_ckpt.catalog.event_log import describe_event
from dagster_ckpt.catalog.records import (
    HANDS_OVER,
    EventRecord,
    EventType,
    ExecutionRecord,
    ExecutionStatus,
    Holder,
    RequestKind,
    RequestStatus,
    StartCause,
)
from dagster_ckpt.catalog.requests import RequestRecords
from dagster_ckpt.client import launching, preflight, requests
from dagster_ckpt.client.launching import hand_over
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.runtime import execution, supervision
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import RunRequest
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.stream.lease import has_living_holder
from dagster_ckpt.stream.liveness import ProcessIdentity
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.executioner import CHANGES, Executioner, Killed
from tests.support.lost_lease import Pristine, Scene
from tests.support.places import path_of
from tests.support.played_query import PlayedQuery
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History
from tests.support.thorough import either

FILES = [(LocalFileIO, "write"), (LocalFileIO, "create"), (LocalFileIO, "create_if_absent")]
STEPS = [(Database, "writing"), *FILES, *(each for each in CHANGES if each[0] is not LocalFileIO or each not in FILES)]
DEADLINE_S = 30


def await_that(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Query(PlayedQuery):
    """Runs until it is stopped, or ends at once."""

    def wait(self, timeout_s: float) -> bool:
        time.sleep(0.02)
        return self.stopped or self.ends


@dataclass
class World:
    """A stream, and the processes that run it; `proves_deaths`: the dead are known to be dead, else leases expire."""

    history: History
    proves_deaths: bool
    running: list[Query] = field(default_factory=list)
    processes: dict[int | None, Process] = field(default_factory=dict)

    @property
    def stream(self) -> Any:
        return self.history.shelf.stream

    @property
    def catalog(self) -> Any:
        return self.stream.catalog

    @property
    def newest(self) -> ExecutionRecord:
        found: ExecutionRecord = self.catalog.executions.latest(STREAM)
        return found

    def commits(self) -> None:
        """The running query commits its next batch."""
        live = self.history.live
        self.history.commit((live.positions().commit or 0) + 1, path_of(live.url))

    def holder(self, execution_id: str, run_id: str, _jvm: object) -> Holder:
        me = self.processes[threading.current_thread().ident].process
        host = me.host if self.proves_deaths else "another host"
        return Holder(execution_id, run_id, host, me.pid, me.start_ticks, me.boot_id or "")

    def forgets(self, process: Process) -> None:
        """It is dead, and its query with it."""
        self.running = [each for each in self.running if each is not process.query]
        process.body.kill()
        process.body.wait()
        if not self.proves_deaths:
            with self.catalog.database.writing() as connection:
                dead = text("UPDATE leases SET expires_at_ms = 1 WHERE pid = :pid")
                connection.execute(dead, {"pid": process.body.pid})

    def asks(self) -> str:
        """A person, or an upgrade, asks for new code beside the old."""
        arguments = {"start_from": "latest", HANDS_OVER: True, "verify_batches": 2}
        request_id: str = self.catalog.requests.submit(
            STREAM, RequestKind.START, arguments=arguments, origin="a test"
        ).request_id
        return request_id

    def unlike_uninterrupted(self) -> list[str]:
        found = self.history.unlike_uninterrupted()
        if self.history.sink_batch != self.history.live.positions().commit:
            found.append(f"the sink is at batch {self.history.sink_batch}")
        return found


class Process:
    """A process of the stream, here a thread, that may be killed. Its identity is that of a process that sleeps."""

    def __init__(
        self,
        world: World,
        name: str,
        *,
        start_request: str | None = None,
        cause: StartCause = StartCause.MANUAL,
        goes_on: bool = False,
    ) -> None:
        self.world, self.name, self.start_request, self.cause = world, name, start_request, cause
        self.query = Query(ends=not goes_on)
        self.was_killed = False
        self.error: Exception | None = None
        self.body = subprocess.Popen(["sleep", "600"])
        self.process = ProcessIdentity.of(self.body.pid)
        self.thread = threading.Thread(target=self._live, name=name)

    def begin(self) -> Process:
        self.thread.start()
        return self

    def end(self) -> Process:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive(), self.name
        self.world.forgets(self)
        return self

    def is_here(self) -> bool:
        """Whether this process is at work, and not another one."""
        return threading.current_thread() is self.thread and not self.was_killed

    def _live(self) -> None:
        self.world.processes[threading.current_thread().ident] = self
        try:
            if self.start_request is not None:
                start_from = StartFrom(verify_batches=2)
                hand_over(self.world.stream, self.start_request, lambda: None, start_from)  # type: ignore[arg-type, return-value]
            execute_stream(
                self.world.stream,
                RunRequest(
                    run_id=self.name,
                    start_query=self._start_query,
                    cause=self.cause,
                    start_request_id=self.start_request,
                    is_launched=True,
                ),
            )
        except Killed:
            self.was_killed = True
            self.world.forgets(self)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.error = error
        finally:
            self.world.running = [each for each in self.world.running if each is not self.query]

    def _start_query(self, live: LiveDirectory) -> Any:
        assert not [each for each in self.world.running if not each.stopped], "two queries run"
        self.world.running.append(self.query)
        assert live.url == self.world.history.live.url
        self.world.commits()
        return self.query


def sentence(event: EventRecord) -> str:
    return describe_event(event.stream_id, event.type, event.payload)[1]


def noted(stream: Any, *_: Any, **__: Any) -> None:
    """In place of the comparison of batches, which needs Spark: what it records."""
    stream.catalog.desired_states.note_preflight(STREAM, PreflightRecord("2", True, "the same", LAST, 1))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Pristine:
    return Pristine(tmp_path_factory.mktemp("hand-over"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "POLL_S", 0.01)
    monkeypatch.setattr(supervision, "REQUEST_POLL_MS", 5)
    monkeypatch.setattr(supervision, "HEARTBEAT_MS", 10**9)
    monkeypatch.setattr(preflight, "plan_of_writer", lambda _: None)
    monkeypatch.setattr(launching, "verify_batches", noted)


def world_of(scene: Scene, patch: pytest.MonkeyPatch, *, proves_deaths: bool) -> World:
    world = World(History.reopened(scene.root), proves_deaths)
    patch.setattr(execution, "this_holder", world.holder)
    patch.setattr(preflight, "named_output", lambda _: NamedOutput("parquet", str(world.history.sink)))
    return world


def old_code(world: World) -> Process:
    old = Process(world, "old", goes_on=True).begin()
    await_that(lambda: world.newest.run_id == "old" and world.newest.status is ExecutionStatus.RUNNING)
    return old


def supervised(world: World, start: str, old: Process) -> str:
    """What the supervisor sensor and then a person do after a death; who goes on."""
    catalog = world.catalog
    is_open = catalog.requests.get(start).status is RequestStatus.PENDING
    if is_open and not catalog.requests.give_up_start(start, "its run died"):
        again = Process(world, "again", start_request=start).begin().end()
        assert again.error is None
        return "new, launched again"
    if world.newest.run_id != "old":
        if world.newest.status in (ExecutionStatus.STARTING, ExecutionStatus.RUNNING):
            restarted = Process(world, "restarted", cause=StartCause.RESTART_NEW_RUN).begin().end()
            assert restarted.error is None
            return "new, restarted"
        return "new"
    assert world.newest.status is ExecutionStatus.RUNNING
    assert catalog.requests.pending(STREAM) == []
    assert old.thread.is_alive()
    world.commits()
    next_one = Process(world, "next", start_request=world.asks()).begin().end()
    assert next_one.error is None
    return "old"


def killed_once(pristine: Pristine, victim: str, passing: int, *, proves_deaths: bool) -> tuple[bool, str]:
    """Kill one of the two before a change; whether it had so many, and who went on."""
    with pristine.again() as scene, pytest.MonkeyPatch.context() as patch:
        world = world_of(scene, patch, proves_deaths=proves_deaths)
        old = old_code(world)
        world.commits()
        start = world.asks()
        new = Process(world, "new", start_request=start)
        asked = threading.Event()
        suspend = RequestRecords.suspend_for

        def suspend_for(*arguments: Any) -> Any:
            # The old process does nothing but wait before it is asked.
            found = suspend(*arguments)
            asked.set()
            return found

        def is_the_victims() -> bool:
            return new.is_here() if victim == "new" else old.is_here() and asked.is_set()

        patch.setattr(RequestRecords, "suspend_for", suspend_for)
        Executioner(patch, passing, *STEPS, of=is_the_victims)
        try:
            new.begin().end()
            assert new.error is None
            went_on = supervised(world, start, old)
        finally:
            old.query.ends = True
            with suppress(AssertionError):
                old.end()
            world.history.close()
        assert world.unlike_uninterrupted() == []
        assert not has_living_holder(world.catalog, STREAM)
        assert world.catalog.requests.pending(STREAM) == []
        world.history.close()
        return new.was_killed or old.was_killed, went_on


@pytest.mark.thorough(but=("dead for sure",))
@pytest.mark.parametrize("proves_deaths", [True, False], ids=["dead for sure", "silent"])
def test_the_new_process_is_killed_before_each_of_its_changes(pristine: Pristine, proves_deaths: bool) -> None:
    went_on: dict[int, str] = {}
    step = 0
    while True:
        was_killed, who = killed_once(pristine, "new", step, proves_deaths=proves_deaths)
        if not was_killed:
            break
        went_on[step] = who
        step += either(quick=3, thorough=1)
    assert {"old", "new, launched again", "new, restarted"} <= set(went_on.values())


@pytest.mark.thorough(but=("dead for sure",))
@pytest.mark.parametrize("proves_deaths", [True, False], ids=["dead for sure", "silent"])
def test_the_old_process_is_killed_before_each_change_after_it_was_asked_to_stop(
    pristine: Pristine, proves_deaths: bool
) -> None:
    step = 0
    while True:
        was_killed, who = killed_once(pristine, "old", step, proves_deaths=proves_deaths)
        assert who.startswith("new")
        if not was_killed:
            break
        step += 1
    assert step


def test_the_gap_in_the_output_is_recorded(pristine: Pristine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pristine.again() as scene:
        world = world_of(scene, monkeypatch, proves_deaths=True)
        old = old_code(world)
        world.commits()
        last = world.history.live.positions().commit or 0
        new = Process(world, "new", start_request=world.asks()).begin().end()
        assert new.error is None
        old.end()
        events = world.catalog.events
        found = events.last_of([STREAM], [EventType.HANDED_OVER], up_to=events.latest_sequence(), each=9)[STREAM]
        times = [path_of(f"{world.history.live.url}/commits/{batch}").stat().st_mtime_ns for batch in (last, last + 1)]
        world.history.close()

    [event] = found
    assert event.payload["batch_id"] == last + 1
    assert event.payload["gap_ms"] == times[1] // 10**6 - times[0] // 10**6
    assert 0 <= event.payload["stopped_ms"] <= DEADLINE_S * 1000
    assert f"batch {last + 1} is the first of the new code, {event.payload['gap_ms']} ms after" in sentence(event)


def test_a_query_does_not_stop_for_a_process_that_died_after_it_asked(
    pristine: Pristine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pristine.again() as scene:
        world = world_of(scene, monkeypatch, proves_deaths=True)
        old, goes_on, is_looking = old_code(world), threading.Event(), threading.Lock()
        looks, suspend = supervision.Supervisor._take_requests, RequestRecords.suspend_for

        def suspend_for(*arguments: Any) -> Any:
            with is_looking:
                suspend(*arguments)
                new.was_killed = True
            raise Killed

        def look(supervisor: supervision.Supervisor) -> None:
            # The old process is busy until the supervisor has noticed the death.
            with is_looking:
                if not new.was_killed or goes_on.is_set():
                    looks(supervisor)

        start = world.asks()
        new = Process(world, "new", start_request=start)
        monkeypatch.setattr(RequestRecords, "suspend_for", suspend_for)
        monkeypatch.setattr(supervision.Supervisor, "_take_requests", look)
        new.begin().end()
        waiting = [each.kind for each in world.catalog.requests.pending(STREAM)]
        assert waiting == [RequestKind.START, RequestKind.SUSPEND]

        monkeypatch.setattr(RequestRecords, "suspend_for", suspend)
        assert world.catalog.requests.give_up_start(start, "its run died")
        goes_on.set()
        assert supervised(world, start, old) == "old"
        old.end()
        assert world.unlike_uninterrupted() == []
        world.history.close()
