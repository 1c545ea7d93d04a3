"""Input and output values of a decision about a managed stream."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from dagster_ckpt.catalog.desired_states import AlertUntil, DesiredRecord, UpgradePhase, UpgradeRecord
from dagster_ckpt.catalog.records import ExecutionRecord, RequestKind, RequestRecord, RequestStatus, SnapshotRecord
from dagster_ckpt.config.modes import DesiredState

# Origin of requests made here, to distinguish them from users' requests.
ORIGIN = "desired state"
_REQUESTS = uuid.UUID("6f1d3c2e-2f0b-4a57-9d0c-6a3f5c1f7f11")
_OPEN = (RequestStatus.PENDING, RequestStatus.ACCEPTED)


class StreamLife(Enum):
    """The current state of a stream.

    NEVER_STARTED: It has no execution.
    ALIVE: Its run is in progress, or its lease is held.
    TO_BE_RESTARTED: It failed or was killed, and the restart strategy decides.
    ENDED: It is not running, and its last execution needs no further action.
    """

    NEVER_STARTED = "NEVER_STARTED"
    ALIVE = "ALIVE"
    TO_BE_RESTARTED = "TO_BE_RESTARTED"
    ENDED = "ENDED"


class StepRun(Enum):
    """Work that a sensor must not do itself and that a separate run performs."""

    PREFLIGHT = "PREFLIGHT"
    ROLL_BACK = "ROLL_BACK"
    CANCEL = "CANCEL"


@dataclass(frozen=True)
class ObservedStream:
    """A stream as observed in the catalog and the orchestrator.

    Attributes:
        life: Its current state.
        now_ms: The catalog's time.
        code_version: Version of the loaded code, None if it declares none.
        execution: Its newest execution.
        is_ours: Whether a request made here started that execution.
        request: The last request made here.
        start_pending: Whether someone else has requested a start.
        has_state: Whether there is a live directory or a snapshot to continue from.
        newest_snapshot: The newest snapshot of its timeline.
        is_healthy: Whether it has committed a batch or completed a snapshot since the upgrade's start.
        is_idle: Whether its query is running and waits for data.
        runs_failed: How many runs of the current step ended without a result.
        run_succeeded: Whether a run of the current step succeeded.
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
        """Whether it is running, as far as known."""
        return self.life is StreamLife.ALIVE

    @property
    def open_request(self) -> RequestRecord | None:
        """The last request made here, while it is unanswered."""
        return self.request if self.request is not None and self.request.status in _OPEN else None

    @property
    def runs_another_version(self) -> bool:
        """Whether the loaded code differs from what the newest execution was started with."""
        return (
            self.execution is not None
            and self.code_version is not None
            and self.execution.code_version != self.code_version
        )


@dataclass(frozen=True)
class Ask:
    """Submit a request to the stream. The id makes repeated submission idempotent."""

    request_id: str
    kind: RequestKind
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Withdraw:
    """Withdraw a request.

    Attributes:
        request_id: The request.
        only_pending: Whether to leave the request if it was accepted in the meantime. If False,
            nothing is left to answer it.
    """

    request_id: str
    only_pending: bool = False


@dataclass(frozen=True)
class Run:
    """Have a run perform the current step. If one is already in progress, nothing happens."""

    step: StepRun


@dataclass(frozen=True)
class Settle:
    """Keep the restart strategy from restarting a failed execution. All state is kept."""

    execution_id: str


@dataclass(frozen=True)
class Adopt:
    """Adopt what a user did with the stream by hand as its desired state."""

    desired: DesiredState


Action = Ask | Withdraw | Run | Settle | Adopt


@dataclass(frozen=True)
class Decision:
    """What to do next, and what to record once it is done.

    Attributes:
        reason: One sentence for users.
        upgrade: The resulting upgrade record.
        alert: What a user must know, or None.
        request_id: The last request made here.
        alert_until: What ends the alert by itself.
        actions: The actions, in order; each can be repeated.
        reached: The desired state has been reached.
        begins: An upgrade begins.
        holds_restart: The restart strategy must not start the stream for now.
    """

    reason: str
    upgrade: UpgradeRecord | None
    alert: str | None
    request_id: str | None
    alert_until: AlertUntil | None = None
    actions: tuple[Action, ...] = ()
    reached: bool = False
    begins: bool = False
    holds_restart: bool = False

    def with_changes(self, *actions: Action, **changes: Any) -> Decision:
        """The same decision with further actions and changed values. Nothing ends a new alert by itself."""
        if "alert" in changes:
            changes.setdefault("alert_until", None)
        return replace(self, actions=(*self.actions, *actions), **changes)


def stay(row: DesiredRecord, reason: str) -> Decision:
    """Do nothing and keep everything recorded."""
    return Decision(reason, row.upgrade, row.alert, row.request_id, row.alert_until)


def ask(row: DesiredRecord, reason: str, step: str, kind: RequestKind, **arguments: Any) -> Decision:
    """Submit a request to the stream, once per step of a generation."""
    request_id = str(uuid.uuid5(_REQUESTS, f"{row.stream_id}/{row.generation}/{step}"))
    return stay(row, reason).with_changes(Ask(request_id, kind, arguments), request_id=request_id)


def move(row: DesiredRecord, upgrade: UpgradeRecord, phase: UpgradePhase, reason: str, **changes: Any) -> Decision:
    """Move an upgrade to another phase."""
    moved = replace(upgrade, phase=phase, reason=reason, **changes)
    alert = f"{moved.to_version}: {reason}" if phase.refuses else None if phase is UpgradePhase.STABLE else row.alert
    keeps_request = phase.is_over or phase is upgrade.phase
    return Decision(
        reason,
        moved,
        alert,
        row.request_id if keeps_request else None,
        row.alert_until if alert is row.alert else None,
        holds_restart=phase not in (UpgradePhase.UPGRADING, UpgradePhase.STABLE),
    )


def cancel_pending(seen: ObservedStream) -> tuple[Action, ...]:
    """For a stream that is not running: withdraw an open request, and prevent a restart."""
    actions: list[Action] = []
    if seen.open_request is not None:
        actions.append(Withdraw(seen.open_request.request_id))
    if seen.life is StreamLife.TO_BE_RESTARTED and seen.execution is not None:
        actions.append(Settle(seen.execution.execution_id))
    return tuple(actions)


STOPPING = (RequestKind.STOP_WITH_SAVEPOINT, RequestKind.SUSPEND, RequestKind.CANCEL)
