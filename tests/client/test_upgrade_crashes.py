"""Whenever the daemon dies between two steps, the next look goes on, and nothing is done twice.

The stream, its runs and the orchestrator are played; the catalog, the decisions and what carries them out are real.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import event

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import DesiredRecord, DesiredStateRecords, PreflightRecord, UpgradePhase
from dagster_ckpt.catalog.executions import ExecutionRecords
from dagster_ckpt.catalog.records import (
    HANDS_OVER,
    ExecutionRecord,
    ExecutionStatus,
    Holder,
    RequestKind,
    RequestRecord,
    RequestStatus,
    SnapshotTrigger,
    StartCause,
)
from dagster_ckpt.catalog.requests import RequestRecords
from dagster_ckpt.client.managed_stream import StepRun
from dagster_ckpt.client.reconciliation import Definition, Orchestrator, StepRuns, reconcile_desired
from dagster_ckpt.policies.upgrade import UpgradeMode, UpgradePolicy
from dagster_ckpt.values.modes import DesiredState, SnapshotKind
from tests.support.as_writer import as_writer, set_stream
from tests.support.thorough import either

HOST = Holder(execution_id="", run_id="", host="here", pid=1, process_start_ticks=1, boot_id="boot")
CHANGES = [
    (RequestRecords, "submit"),
    (RequestRecords, "withdraw"),
    (ExecutionRecords, "settle"),
    (DesiredStateRecords, "put"),
    (DesiredStateRecords, "advance"),
]
LOOKS = 60


class Killed(BaseException):
    """The daemon ends here."""


class Clock:
    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def __call__(self) -> int:
        # No two things happen at once.
        self.now_ms += 1
        return self.now_ms


class World:
    """One stream whose process, runs and orchestrator are played."""

    def __init__(self, catalog: Catalog, clock: Clock, *, works: bool, fits: bool, policy: UpgradePolicy) -> None:
        self.catalog = catalog
        self.clock = clock
        self.stream_id = f"stream-{uuid.uuid4()}"
        self.works, self.fits, self.policy = works, fits, policy
        self.code_version = "1"
        self.declared: DesiredState | None = DesiredState.RUNNING
        self.over: set[str] = set()
        self.answers: dict[str, str] = {}
        self.runs: dict[str, StepRun] = {}
        self.launched: list[StepRun] = []
        self.started_from: list[tuple[str | None, Any]] = []
        catalog.streams.ensure(self.stream_id, name="n", asset_key="a", options={})
        catalog.desired_states.ensure(self.stream_id, origin="definition")

    @property
    def row(self) -> DesiredRecord:
        row = self.catalog.desired_states.find(self.stream_id)
        assert row is not None
        return row

    @property
    def phase(self) -> UpgradePhase | None:
        return self.row.upgrade.phase if self.row.upgrade is not None else None

    @property
    def newest(self) -> ExecutionRecord:
        execution = self.catalog.executions.latest(self.stream_id)
        assert execution is not None
        return execution

    def look(self) -> None:
        """One tick of the sensor."""
        definition = Definition(self.stream_id, self.declared, self.policy, self.code_version)
        orchestrator = Orchestrator(
            has_ended=lambda execution: execution.run_id in self.over,
            start_request_of=self.answers.get,
            runs_of_step=lambda step: StepRuns(succeeded=self.runs.get(step) is not None),
        )
        step = reconcile_desired(self.catalog, self.row, definition, orchestrator)
        # A run has the name of its step for a key, so that it is launched once.
        if step.run is not None and step.step_name not in self.runs:
            self.runs[step.step_name] = step.run
            self.launched.append(step.run)

    def pass_time(self) -> None:
        """What the stream's process and the launched runs do between two ticks."""
        self.clock.now_ms += 1_000
        for request in self.catalog.requests.pending(self.stream_id):
            self._answer(request)
        row = self.row
        if row.upgrade is not None and StepRun.PREFLIGHT in self.launched and self.phase is UpgradePhase.PREFLIGHT:
            result = PreflightRecord(self.code_version, self.fits, "as the test says", 7, self.clock())
            self.catalog.desired_states.note_preflight(self.stream_id, result)
        if row.upgrade is not None and self.phase is UpgradePhase.RESTORING and StepRun.ROLL_BACK in self.launched:
            after = replace(row.upgrade, phase=UpgradePhase.ROLLED_BACK, reason="rolled back")
            self.catalog.desired_states.advance(row, upgrade=after, alert="rolled back", request_id=row.request_id)

    def _answer(self, request: RequestRecord) -> None:
        is_alive = self.catalog.executions.latest(self.stream_id) is not None and self.newest.run_id not in self.over
        if request.kind is RequestKind.START:
            if is_alive and request.arguments.get(HANDS_OVER):
                if not self.fits:
                    self.catalog.requests.fail_start(request.request_id, "output differs, as the test says")
                    return
                asked = self.catalog.requests.suspend_for(request.request_id)
                assert asked is not None
                self._answer(asked)
                is_alive = False
            assert not is_alive, "two runs of one stream"
            self._start(request)
        elif is_alive:
            snapshot_id = self._savepoint() if request.kind is RequestKind.STOP_WITH_SAVEPOINT else None
            as_writer(self.catalog).requests.resolve(
                request.request_id, RequestStatus.COMPLETED, snapshot_id=snapshot_id
            )
            ended = {RequestKind.CANCEL: ExecutionStatus.CANCELED, RequestKind.SUSPEND: ExecutionStatus.SUSPENDED}
            status = ended.get(request.kind, ExecutionStatus.FINISHED)
            self.catalog.executions.end_unheld(self.newest.execution_id, status, "asked for", settled=True)
            self.over.add(self.newest.run_id)

    def _start(self, request: RequestRecord) -> None:
        execution_id, run_id = str(uuid.uuid4()), str(uuid.uuid4())
        self.answers[run_id] = request.request_id
        self.started_from.append((self.code_version, request.arguments["start_from"]))
        as_writer(self.catalog, self.stream_id).executions.start(
            execution_id, run_id=run_id, cause=StartCause.MANUAL, holder=HOST, code_version=self.code_version
        )
        as_writer(self.catalog).executions.running(execution_id, live_directory="/live", recovery={})
        set_stream(self.catalog, self.stream_id, live_directory="/live")
        as_writer(self.catalog).requests.resolve(request.request_id, RequestStatus.COMPLETED)
        if self.works or self.code_version == "1":
            as_writer(self.catalog).executions.heartbeat(execution_id, {"batch_id": 7})

    def _savepoint(self) -> str:
        snapshot_id = str(uuid.uuid4())
        number = self.catalog.streams.allocate_number(self.stream_id)
        as_writer(self.catalog, self.stream_id).snapshots.start(
            snapshot_id=snapshot_id,
            execution_id=self.newest.execution_id,
            kind=SnapshotKind.SAVEPOINT,
            number=number,
            trigger=SnapshotTrigger.STOP,
            timeline=0,
        )
        as_writer(self.catalog).complete(snapshot_id, location=f"file:///{snapshot_id}", batch_id=7)
        return snapshot_id

    def live(self, done: Callable[[], bool]) -> None:
        """Let ticks and time pass until something is so."""
        for _ in range(LOOKS):
            self.look()
            if done():
                return
            self.pass_time()
        pytest.fail(f"it did not come to that: {self.row}")


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory, clock: Clock) -> Iterator[Catalog]:
    catalog = Catalog(f"sqlite:///{tmp_path_factory.mktemp('catalog') / 'catalog.db'}", clock=clock)

    @event.listens_for(catalog.database.engine, "connect")
    def do_not_wait_for_the_disk(connection: Any, _record: object) -> None:
        # It is the daemon that dies here, not the machine.
        connection.execute("PRAGMA synchronous=OFF")

    yield catalog
    catalog.close()


def killing(patch: pytest.MonkeyPatch, changes: int) -> list[str]:
    """Kill the daemon before its n-th change of the catalog, which is after the one before, once."""
    left = itertools.count(changes, -1)
    killed: list[str] = []

    def wrapped(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if not killed and next(left) == 0:
                killed.append(name)
                raise Killed
            return change(*arguments, **named)

        return call

    for owner, name in CHANGES:
        patch.setattr(owner, name, wrapped(name, getattr(owner, name)))
    return killed


def upgraded(world: World) -> None:
    world.code_version = "2"
    world.live(lambda: world.phase is UpgradePhase.STABLE and world.row.reached == world.row.generation)
    assert world.newest.code_version == "2"
    assert world.started_from == [("1", "latest"), ("2", "latest")]
    assert world.launched == [StepRun.PREFLIGHT]


def upgraded_from_nothing(world: World) -> None:
    world.code_version = "2"
    world.live(lambda: world.phase is UpgradePhase.STABLE and world.row.reached == world.row.generation)
    assert world.started_from == [("1", "latest"), ("2", "empty")]
    assert world.launched == []


def refused(world: World) -> None:
    old = world.newest.execution_id
    world.code_version = "2"
    world.live(lambda: world.phase is UpgradePhase.REFUSED)
    for _ in range(3):
        world.look()
        world.pass_time()
    assert world.newest.execution_id == old
    assert world.newest.status is ExecutionStatus.RUNNING
    assert "as the test says" in (world.row.alert or "")
    assert world.launched == [StepRun.PREFLIGHT]


def handed_over(world: World) -> None:
    old = world.newest
    world.code_version = "2"
    world.live(lambda: world.phase is UpgradePhase.STABLE)
    assert world.catalog.executions.get(old.execution_id).status is ExecutionStatus.SUSPENDED
    assert world.started_from == [("1", "latest"), ("2", "latest")]


def not_handed_over(world: World) -> None:
    old = world.newest.execution_id
    world.code_version = "2"
    world.live(lambda: world.phase is UpgradePhase.REFUSED)
    assert (world.newest.execution_id, world.newest.status) == (old, ExecutionStatus.RUNNING)
    assert "output differs" in (world.row.alert or "")


def rolled_back(world: World) -> None:
    world.code_version = "2"
    world.live(lambda: world.phase is UpgradePhase.ROLLED_BACK)
    assert world.launched == [StepRun.PREFLIGHT, StepRun.ROLL_BACK]
    for _ in range(3):
        world.look()
        world.pass_time()
    assert world.started_from == [("1", "latest"), ("2", "latest")], "the bad version is not started again"
    assert world.row.upgrade is not None
    assert world.row.upgrade.snapshot_id is not None


def suspended_and_wanted_again(world: World) -> None:
    world.declared = None
    world.catalog.desired_states.put(world.stream_id, DesiredState.SUSPENDED, origin="anna")
    world.live(lambda: world.row.reached == world.row.generation)
    assert world.newest.status is ExecutionStatus.FINISHED
    world.catalog.desired_states.put(world.stream_id, DesiredState.RUNNING, origin="anna")
    world.live(lambda: world.row.reached == world.row.generation)
    assert world.newest.status is ExecutionStatus.RUNNING
    assert len(world.started_from) == 2


def canceled_by_hand(world: World) -> None:
    """A person's own request; the sensor takes it over as what is wanted."""
    world.catalog.requests.submit(world.stream_id, RequestKind.CANCEL, origin="anna")
    world.pass_time()
    world.live(lambda: world.row.reached == world.row.generation and world.row.desired is DesiredState.CANCELED)
    assert len(world.started_from) == 1


SAVEPOINT = UpgradePolicy(rollback_after_ms=5_000)
STORIES: list[tuple[Callable[[World], None], bool, bool, UpgradePolicy]] = [
    (upgraded, True, True, SAVEPOINT),
    (upgraded_from_nothing, True, True, UpgradePolicy(UpgradeMode.STATELESS)),
    (refused, True, False, SAVEPOINT),
    (handed_over, True, True, UpgradePolicy(UpgradeMode.HAND_OVER)),
    (not_handed_over, True, False, UpgradePolicy(UpgradeMode.HAND_OVER)),
    (rolled_back, False, True, SAVEPOINT),
    (suspended_and_wanted_again, True, True, SAVEPOINT),
    (canceled_by_hand, True, True, SAVEPOINT),
]


@pytest.mark.thorough(but="rolled_back-SAVEPOINT")
@pytest.mark.parametrize(
    ("story", "works", "fits", "policy"),
    STORIES,
    ids=[f"{story.__name__}-{policy.mode.value}" for story, _, _, policy in STORIES],
)
def test_a_daemon_that_dies_at_any_step_goes_on_where_it_was(
    catalog: Catalog,
    clock: Clock,
    story: Callable[[World], None],
    works: bool,
    fits: bool,
    policy: UpgradePolicy,
) -> None:
    for changes in itertools.count(step=either(quick=3, thorough=1)):
        world = World(catalog, clock, works=works, fits=fits, policy=policy)
        world.live(lambda world=world: world.row.reached == world.row.generation)
        look = world.look

        def survive(look: Callable[[], None] = look) -> None:
            try:
                look()
            except Killed:
                look()

        world.look = survive  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            killed = killing(patch, changes)
            # What a person or the played stream changes is not the daemon's, and is not killed.
            _spare_others(patch, world)
            story(world)
        open_requests = [
            request for request in catalog.requests.pending(world.stream_id) if request.kind is not RequestKind.START
        ]
        assert open_requests == [], killed
        if not killed:
            assert changes > 1, "nothing was ever killed"
            return


def test_a_rolled_back_stream_goes_on_with_the_next_version(catalog: Catalog, clock: Clock) -> None:
    world = World(catalog, clock, works=False, fits=True, policy=SAVEPOINT)
    world.live(lambda: world.row.reached == world.row.generation)
    rolled_back(world)
    world.code_version, world.works = "3", True
    world.live(lambda: world.phase is UpgradePhase.STABLE and world.row.reached == world.row.generation)
    assert world.started_from[2:] == [("3", "latest")]


def _spare_others(patch: pytest.MonkeyPatch, world: World) -> None:
    """Only what happens within a look counts as the daemon's."""
    armed = {(owner, name): getattr(owner, name) for owner, name in CHANGES}
    plain = {key: ORIGINAL[key] for key in armed}
    for (owner, name), change in plain.items():
        patch.setattr(owner, name, change)
    look = world.look

    def armed_look() -> None:
        for (owner, name), change in armed.items():
            setattr(owner, name, change)
        try:
            look()
        finally:
            for (owner, name), change in plain.items():
                setattr(owner, name, change)

    world.look = armed_look  # type: ignore[method-assign]


ORIGINAL = {(owner, name): getattr(owner, name) for owner, name in CHANGES}
