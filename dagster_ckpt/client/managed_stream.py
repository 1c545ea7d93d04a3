"""What is observed of a managed stream, what can be decided, and how it is stopped. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from dagster_ckpt.catalog.desired_states import AlertUntil, DesiredRecord, UpgradePhase, UpgradeRecord
from dagster_ckpt.catalog.records import (
    DESIRED_STATE_ORIGIN,
    ExecutionRecord,
    RequestKind,
    RequestRecord,
    RequestStatus,
    SnapshotRecord,
)
from dagster_ckpt.stream.liveness import SILENCE_MS
from dagster_ckpt.values.durations import rounded_duration
from dagster_ckpt.values.modes import DesiredState

# Distinguishes the supervisor's requests from those of users.
ORIGIN = DESIRED_STATE_ORIGIN
_REQUESTS = uuid.UUID("6f1d3c2e-2f0b-4a57-9d0c-6a3f5c1f7f11")
_OPEN = (RequestStatus.PENDING, RequestStatus.ACCEPTED)
STOPPING = (RequestKind.STOP_WITH_SAVEPOINT, RequestKind.SUSPEND, RequestKind.CANCEL)


class StreamLife(Enum):
    """What a managed stream is doing.

    ALIVE: Its run is in progress, or its lease is held. TO_BE_RESTARTED: The restart strategy decides. ENDED: Its last
    execution needs no further action.
    """

    NEVER_STARTED = "NEVER_STARTED"
    ALIVE = "ALIVE"
    TO_BE_RESTARTED = "TO_BE_RESTARTED"
    ENDED = "ENDED"


class StepRun(Enum):
    """Work that takes too long for a sensor."""

    PREFLIGHT = "PREFLIGHT"
    ROLL_BACK = "ROLL_BACK"
    CANCEL = "CANCEL"


@dataclass(frozen=True)
class ObservedStream:
    """A stream as observed in the catalog and the orchestrator.

    Attributes:
        is_ours: Whether the supervisor requested the newest execution.
        request: The supervisor's last request.
        start_pending: Whether a user has requested a start.
        is_healthy: Whether it committed a batch or completed a snapshot since the upgrade's start.
        restarts: Executions after the first of the new code that no user started.
        failing: Health checks with an ERROR, and `source_lag` with a warning.
        runs_failed: Runs of the current step without a result.
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
    restarts: int = 0
    failing: tuple[str, ...] = ()
    runs_failed: int = 0
    run_succeeded: bool = False

    @property
    def is_alive(self) -> bool:
        return self.life is StreamLife.ALIVE

    @property
    def open_request(self) -> RequestRecord | None:
        return self.request if self.request is not None and self.request.status in _OPEN else None

    @property
    def runs_another_version(self) -> bool:
        return (
            self.execution is not None
            and self.code_version is not None
            and self.execution.code_version != self.code_version
        )


@dataclass(frozen=True)
class Ask:
    """Submit a request; its id makes repeated submission idempotent."""

    request_id: str
    kind: RequestKind
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Withdraw:
    """Withdraw a request; with `only_pending`, not if a process has accepted it."""

    request_id: str
    only_pending: bool = False


@dataclass(frozen=True)
class Run:
    """Let a run perform the current step, unless one is in progress."""

    step: StepRun


@dataclass(frozen=True)
class Settle:
    """Keep the restart strategy from restarting a failed execution. All state is kept."""

    execution_id: str


@dataclass(frozen=True)
class Adopt:
    """Make what a user did with the stream by hand its desired state."""

    desired: DesiredState


Action = Ask | Withdraw | Run | Settle | Adopt


@dataclass(frozen=True)
class Decision:
    """What to do next, and what to record once it is done.

    Attributes:
        alert_until: What ends the alert automatically.
        actions: In order; each is repeatable.
        holds_restart: Whether the restart strategy must not start the stream now.
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
        """Add actions and change fields; a new alert ends automatically only with its own `alert_until`."""
        if "alert" in changes:
            changes.setdefault("alert_until", None)
        return replace(self, actions=(*self.actions, *actions), **changes)


def stay(row: DesiredRecord, reason: str) -> Decision:
    return Decision(reason, row.upgrade, row.alert, row.request_id, row.alert_until)


def ask(row: DesiredRecord, reason: str, step: str, kind: RequestKind, **arguments: Any) -> Decision:
    """Submit a request, once per step of a generation."""
    request_id = str(uuid.uuid5(_REQUESTS, f"{row.stream_id}/{row.generation}/{step}"))
    return stay(row, reason).with_changes(Ask(request_id, kind, arguments), request_id=request_id)


def move(row: DesiredRecord, upgrade: UpgradeRecord, phase: UpgradePhase, reason: str, **changes: Any) -> Decision:
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
    actions: list[Action] = []
    if seen.open_request is not None:
        actions.append(Withdraw(seen.open_request.request_id))
    if seen.life is StreamLife.TO_BE_RESTARTED and seen.execution is not None:
        actions.append(Settle(seen.execution.execution_id))
    return tuple(actions)


def ask_to_stop(
    row: DesiredRecord,
    seen: ObservedStream,
    first: RequestKind,
    *,
    again: RequestKind,
    since_ms: int,
    timeout_ms: int | None,
    reason: str,
    step: str = "stop",
) -> Decision:
    """Request a stop, then wait. If that fails, request it in another way, or alert users.

    Args:
        again: The kind of request after a failed one, or for a later execution.
        since_ms: Earlier requests are ignored.
        timeout_ms: Time to answer, and again to end; None: unlimited.
        step: Names the request, unique within the generation.
    """
    request = seen.request
    execution = seen.execution
    if request is None or request.kind not in STOPPING or request.created_at_ms < since_ms:
        return ask(row, reason, step, first)
    is_open = seen.open_request is not None
    if is_open or execution is None or _ends(request, execution.started_at_ms):
        waits = f"waiting for the answer to {request.kind.value}" if is_open else "waiting for its run to end"
        waiting = stay(row, f"{reason}: {waits}")
        late = overdue(seen, timeout_ms)
        return waiting if late is None else waiting.with_changes(alert=late, alert_until=AlertUntil.STOPPED)
    why = f"{request.kind.value} had no effect ({request.error or 'an execution started after it'})"
    return ask(row, f"{reason}: {why}", f"{step} {execution.execution_id}", again)


def overdue(seen: ObservedStream, timeout_ms: int | None) -> str | None:
    """Return an alert, the same at each call, if a stream has not answered a stop or ended in time."""
    request, execution = seen.request, seen.execution
    if request is None or execution is None or timeout_ms is None or request.kind not in STOPPING:
        return None
    is_answered = request.status is RequestStatus.COMPLETED
    since_ms = (request.resolved_at_ms or 0) if is_answered else request.created_at_ms
    # The wait ended when the request was withdrawn.
    now_ms = (request.resolved_at_ms or 0) if request.status is RequestStatus.WITHDRAWN else seen.now_ms
    if now_ms - since_ms < timeout_ms:
        return None
    limit = rounded_duration(timeout_ms)
    kind = request.kind.value
    if is_answered:
        found = f"it answered {kind}, but its run had not ended {limit} later"
    elif request.status is RequestStatus.ACCEPTED:
        found = f"its process received {kind}, but did not answer it within {limit}"
    else:
        found = f"no process received {kind} within {limit}"
    is_silent = seen.now_ms - execution.heartbeat_at_ms > SILENCE_MS
    life = (
        "has sent no heartbeat recently, although its run or its lease is active"
        if is_silent
        else "still sends heartbeats"
    )
    process = f"process {execution.pid} on {execution.host}"
    return (
        f"it was not stopped: {found}; {process}, of run {execution.run_id}, {life}. Check the log of that run, then "
        "terminate the run (by force if it does not react) or kill the process: committed batches are kept."
    )


def _ends(request: RequestRecord, started_at_ms: int) -> bool:
    return request.status is RequestStatus.COMPLETED and started_at_ms <= (request.resolved_at_ms or 0)
