"""Decides what to do about an execution that ended without being settled. Pure.

A process that was killed, or was stopped by something other than its user, leaves an unsettled
execution behind. The orchestrator's record of its run decides how it ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

from dagster_ckpt.catalog.records import ExecutionStatus
from dagster_ckpt.policies.guard import decide_restart
from dagster_ckpt.policies.restart import FailureHistory, RestartAt, RestartPolicy
from dagster_ckpt.values.modes import TerminalState

# Launching a run takes longer than this before its query starts, so an evaluation this much too
# early may act now.
LAUNCH_MS = 2_000


class RecordedEnd(Enum):
    """The state of an execution's run as recorded by the orchestrator."""

    STILL_RUNNING = "STILL_RUNNING"
    SUCCEEDED = "SUCCEEDED"
    CANCELED = "CANCELED"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Wait:
    """No action yet."""

    reason: str


@dataclass(frozen=True)
class Restart:
    """Start a new run from the latest state."""

    reason: str


@dataclass(frozen=True)
class Retain:
    """The stream has ended: apply externalized retention for its final state."""

    state: TerminalState
    reason: str


Verdict = Wait | Restart | Retain

_BEFORE_THE_END = (ExecutionStatus.STARTING, ExecutionStatus.RUNNING)
# Deliberate ends. A process that dies after one of them has only failed to clean up.
_ON_PURPOSE = {
    ExecutionStatus.FINISHED: TerminalState.FINISHED,
    ExecutionStatus.SUSPENDED: TerminalState.SUSPENDED,
    ExecutionStatus.CANCELED: TerminalState.CANCELED,
}


def reconcile(
    recorded: RecordedEnd,
    ended: ExecutionStatus,
    strategy: RestartPolicy,
    failed_at_ms: Sequence[int],
    *,
    holds_lease: bool,
    now_ms: int,
    random: Random,
) -> Verdict:
    """Decide about one unsettled execution.

    Args:
        recorded: What the orchestrator recorded for its run.
        ended: What the execution itself recorded before its process ended.
        strategy: The stream's restart strategy.
        failed_at_ms: Failures since a user last started the stream, including this one, in ms since the
            epoch.
        holds_lease: Whether its process still renews the lease: nothing is deleted under a query that
            may write, and a process that was not found dead is not replaced.
        now_ms: The catalog's time, which dates the failures.
        random: For the jitter of exponential delays. Seed it per execution, so that every evaluation of
            the same failure yields the same delay.
    """
    verdict = _decide(recorded, ended, strategy, failed_at_ms, now_ms=now_ms, random=random)
    if isinstance(verdict, Retain) and holds_lease:
        return Wait("its run has ended, but its process is still stopping")
    if isinstance(verdict, Restart) and holds_lease and ended in _BEFORE_THE_END:
        return Wait("its run has ended, but its process still holds the lease")
    return verdict


def _decide(
    recorded: RecordedEnd,
    ended: ExecutionStatus,
    strategy: RestartPolicy,
    failed_at_ms: Sequence[int],
    *,
    now_ms: int,
    random: Random,
) -> Verdict:
    if recorded is RecordedEnd.STILL_RUNNING:
        return Wait("its run has not ended")
    if ended in _ON_PURPOSE:
        return Retain(_ON_PURPOSE[ended], f"it ended {ended.value} without cleaning up")
    if recorded is RecordedEnd.CANCELED:
        return Retain(TerminalState.CANCELED, "its run was canceled without cleaning up")
    if recorded is RecordedEnd.SUCCEEDED:
        return Retain(TerminalState.SUSPENDED, "its run succeeded without cleaning up")
    decision = decide_restart(strategy, FailureHistory(tuple(failed_at_ms) or (now_ms,)), now_ms, random)
    if not isinstance(decision, RestartAt):
        return Retain(TerminalState.FAILED, decision.reason)
    if now_ms + LAUNCH_MS < decision.at_ms:
        return Wait(f"{decision.reason}; the restart is due in {decision.at_ms - now_ms} ms")
    return Restart(decision.reason)
