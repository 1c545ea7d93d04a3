"""What a decision about a managed stream is made from, and what it can be. Values only."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from dagster_ckpt.catalog.desired_states import DesiredRecord, UpgradePhase, UpgradeRecord
from dagster_ckpt.catalog.records import ExecutionRecord, RequestKind, RequestRecord, RequestStatus, SnapshotRecord
from dagster_ckpt.config.modes import DesiredState

# Origin of the requests that are made here, by which a start is known to be no person's.
ORIGIN = "desired state"
_REQUESTS = uuid.UUID("6f1d3c2e-2f0b-4a57-9d0c-6a3f5c1f7f11")
_OPEN = (RequestStatus.PENDING, RequestStatus.ACCEPTED)


class StreamLife(Enum):
    """What a stream is at the moment.

    NEVER_STARTED: No execution of it was ever begun.
    ALIVE: Its run is not over, or somebody holds its lease.
    TO_BE_RESTARTED: It failed or was killed, and the restart strategy has the next word.
    ENDED: It does not run, and nothing is left to do for its last execution.
    """

    NEVER_STARTED = "NEVER_STARTED"
    ALIVE = "ALIVE"
    TO_BE_RESTARTED = "TO_BE_RESTARTED"
    ENDED = "ENDED"


class StepRun(Enum):
    """Work that a sensor must not do itself, done by a run of its own."""

    PREFLIGHT = "PREFLIGHT"
    ROLL_BACK = "ROLL_BACK"
    CANCEL = "CANCEL"


@dataclass(frozen=True)
class Seen:
    """A stream as the catalog and the orchestrator show it.

    Attributes:
        life: What it is.
        now_ms: The catalog's time.
        code_version: Version of the code that is loaded now, None where its owner names none.
        execution: Its newest execution.
        is_ours: Whether that was started by a request made here.
        request: The last request made here.
        start_pending: Whether somebody else has asked for a start.
        has_state: Whether there is a live directory or a snapshot to go on from.
        newest_snapshot: The newest snapshot of its timeline.
        is_healthy: Whether it has committed a batch or completed a snapshot since the upgrade's start.
        is_idle: Whether its query runs and waits for data.
        runs_failed: How many runs of the present step ended without a result.
        run_succeeded: Whether a run of the present step ended well.
    """

    life: StreamLife
    now_ms: int
    code_version: str | None = None
    execution: ExecutionRecord | None = None
    is_ours: bool = False
    request: RequestRecord | None = None
    start_pending: bool = False
    has_state: bool = False
    newest_snapshot: SnapshotRecord | None = None
    is_healthy: bool = False
    is_idle: bool = False
    runs_failed: int = 0
    run_succeeded: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether it runs, as far as is known."""
        return self.life is StreamLife.ALIVE

    @property
    def open_request(self) -> RequestRecord | None:
        """The last request made here, while it is not answered."""
        return self.request if self.request is not None and self.request.status in _OPEN else None

    @property
    def runs_another_version(self) -> bool:
        """Whether the code that is loaded is not what the newest execution was started with."""
        return (
            self.execution is not None
            and self.code_version is not None
            and self.execution.code_version != self.code_version
        )


@dataclass(frozen=True)
class Ask:
    """Ask something of the stream. The id makes asking twice the same as once."""

    request_id: str
    kind: RequestKind
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Withdraw:
    """Take a request back.

    Attributes:
        request_id: The request.
        only_pending: Whether one that was taken up meanwhile is left; else nobody is left to answer it.
    """

    request_id: str
    only_pending: bool = False


@dataclass(frozen=True)
class Run:
    """Have a run do the present step; one that is under way already is left alone."""

    step: StepRun


@dataclass(frozen=True)
class Settle:
    """Keep the restart strategy from starting a failed execution again; everything is kept."""

    execution_id: str


@dataclass(frozen=True)
class Adopt:
    """Take what a person did with the stream by hand as what is wanted."""

    desired: DesiredState


Action = Ask | Withdraw | Run | Settle | Adopt


@dataclass(frozen=True)
class Decision:
    """What is done next, and what is recorded once it is done.

    Attributes:
        reason: One sentence for a person.
        upgrade: The upgrade, as it is then.
        alert: What a person has to know; None: nothing.
        request_id: The last request made here.
        actions: What is done, in order; each may be done twice.
        reached: The world is as it is wanted.
        begins: An upgrade begins.
        holds_restart: The restart strategy must not start the stream meanwhile.
    """

    reason: str
    upgrade: UpgradeRecord | None
    alert: str | None
    request_id: str | None
    actions: tuple[Action, ...] = ()
    reached: bool = False
    begins: bool = False
    holds_restart: bool = False

    def but(self, *actions: Action, **changes: Any) -> Decision:
        """The same decision with further actions and other values."""
        return replace(self, actions=(*self.actions, *actions), **changes)


def stay(row: DesiredRecord, reason: str) -> Decision:
    """Do nothing, and leave everything recorded as it is."""
    return Decision(reason, row.upgrade, row.alert, row.request_id)


def ask(row: DesiredRecord, reason: str, step: str, kind: RequestKind, **arguments: Any) -> Decision:
    """Ask something of the stream, once for each step of a generation."""
    request_id = str(uuid.uuid5(_REQUESTS, f"{row.stream_id}/{row.generation}/{step}"))
    return stay(row, reason).but(Ask(request_id, kind, arguments), request_id=request_id)


def move(row: DesiredRecord, upgrade: UpgradeRecord, phase: UpgradePhase, reason: str, **changes: Any) -> Decision:
    """Bring an upgrade to another phase."""
    moved = replace(upgrade, phase=phase, reason=reason, **changes)
    alert = f"{moved.to_version}: {reason}" if phase.refuses else None if phase is UpgradePhase.STABLE else row.alert
    keeps_request = phase.is_over or phase is upgrade.phase
    return Decision(
        reason,
        moved,
        alert,
        row.request_id if keeps_request else None,
        holds_restart=phase not in (UpgradePhase.UPGRADING, UpgradePhase.STABLE),
    )


def quieten(seen: Seen) -> tuple[Action, ...]:
    """For a stream that does not run: nobody is to answer what was asked, and nobody to restart it."""
    actions: list[Action] = []
    if seen.open_request is not None:
        actions.append(Withdraw(seen.open_request.request_id))
    if seen.life is StreamLife.TO_BE_RESTARTED and seen.execution is not None:
        actions.append(Settle(seen.execution.execution_id))
    return tuple(actions)


STOPPING = (RequestKind.STOP_WITH_SAVEPOINT, RequestKind.SUSPEND, RequestKind.CANCEL)
