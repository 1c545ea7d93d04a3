"""Answer for a policy, which may be a user's code, that raises or returns nonsense."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from random import Random

from dagster_ckpt.policies.restart import (
    ExponentialDelayRestartStrategyConfiguration,
    FailureHistory,
    NoRestart,
    RestartAt,
    RestartPolicy,
)
from dagster_ckpt.policies.retention import RetainedKind, RetainedSnapshot, RetentionContext, RetentionPolicy
from dagster_ckpt.policies.trigger import Interval, TriggerPolicy, TriggerProgress
from dagster_ckpt.values.validation import policy_name

logger = logging.getLogger(__name__)


class KeptBecause(Enum):
    """Why a snapshot stays; PROVEN: it is the newest one whose state was loaded."""

    POLICY = "POLICY"
    NEWEST = "NEWEST"
    PROVEN = "PROVEN"
    IN_USE = "IN_USE"
    POLICY_FAILED = "POLICY_FAILED"


@dataclass(frozen=True)
class RetentionDecision:
    """`kept` has reasons by snapshot id, `dropped` is oldest first; `problem`: why the policy's answer was not used."""

    kept: Mapping[str, KeptBecause]
    dropped: tuple[RetainedSnapshot, ...] = ()
    problem: str | None = field(default=None, compare=False)


def needed_for_recovery(snapshots: Sequence[RetainedSnapshot]) -> dict[str, KeptBecause]:
    """What no policy may drop: of snapshots oldest first, the newest one and the newest checkpoint.

    A user may delete a savepoint, and later incremental checkpoints may refer to the newest checkpoint. As in Flink, a
    stream that stopped with a savepoint needs none.
    """
    if not snapshots:
        return {}
    newest, checkpoint = snapshots[-1], _newest_checkpoint(snapshots)
    needed = {newest.snapshot_id: KeptBecause.NEWEST}
    if checkpoint is not None and newest.kind is not RetainedKind.STOP_WITH_SAVEPOINT:
        needed[checkpoint.snapshot_id] = KeptBecause.NEWEST
    return needed


def needed_of_history(savepoints: Sequence[RetainedSnapshot], held: Collection[str]) -> dict[str, KeptBecause]:
    newest = {snapshot.snapshot_id: KeptBecause.NEWEST for snapshot in savepoints[-1:]}
    return newest | dict.fromkeys(held, KeptBecause.IN_USE)


def decide_retention(
    policy: RetentionPolicy,
    snapshots: Sequence[RetainedSnapshot],
    context: RetentionContext,
    *,
    needed: Mapping[str, KeptBecause],
) -> RetentionDecision:
    """Ask a policy which snapshots, oldest first, stay; `needed` ones stay regardless.

    A policy that raises, or answers with other snapshots, drops nothing; this is logged.
    """
    try:
        # An answer that never ends is refused as well.
        answers = list(islice(policy.keep(tuple(snapshots), context), len(snapshots) + 1))
        answer = frozenset(answers)
        unknown = answer - frozenset(snapshots)
        problem = f"it returned {next(iter(unknown))!r}, which is not one of the snapshots" if unknown else None
        if len(answers) > len(snapshots):
            problem = problem or f"it returned more than the {len(snapshots)} existing snapshots"
    except Exception as error:  # noqa: BLE001 - a user's code may raise anything
        answer, problem = frozenset(), f"{type(error).__name__}: {error}"
    if problem is not None:
        logger.warning("Retention policy %s failed, so nothing is deleted: %s", policy_name(policy), problem)
        return RetentionDecision({each.snapshot_id: KeptBecause.POLICY_FAILED for each in snapshots}, (), problem)
    kept = {each.snapshot_id: KeptBecause.POLICY for each in snapshots if each in answer}
    kept |= {each.snapshot_id: needed[each.snapshot_id] for each in snapshots if each.snapshot_id in needed}
    return RetentionDecision(kept, tuple(each for each in snapshots if each.snapshot_id not in kept))


def snapshot_to_recover_from(
    snapshots: Sequence[RetainedSnapshot], *, prefer_checkpoint: bool
) -> RetainedSnapshot | None:
    if not snapshots:
        return None
    if not prefer_checkpoint:
        return snapshots[-1]
    return _newest_checkpoint(snapshots) or snapshots[-1]


def _newest_checkpoint(snapshots: Sequence[RetainedSnapshot]) -> RetainedSnapshot | None:
    return next((snapshot for snapshot in reversed(snapshots) if snapshot.kind is RetainedKind.CHECKPOINT), None)


# An unneeded checkpoint costs less than a missing one.
FALLBACK_TRIGGER = Interval(60_000)


class GuardedTrigger:
    """A trigger policy, or `FALLBACK_TRIGGER` while that raises or returns no time."""

    def __init__(self, policy: TriggerPolicy) -> None:
        self._policy = policy
        self._logged: str | None = None

    def due_at_ms(self, progress: TriggerProgress) -> int | None:
        try:
            answer: object = self._policy.due_at_ms(progress)
            problem = f"it returned {answer!r}, which is neither a time in ms nor None"
        except Exception as error:  # noqa: BLE001 - a user's code may raise anything
            answer, problem = "", f"{type(error).__name__}: {error}"
        if answer is None or (isinstance(answer, int) and not isinstance(answer, bool)):
            self._logged = None
            return answer
        if problem != self._logged:
            self._logged = problem
            logger.warning(
                "Trigger policy %s failed, so %s applies: %s", policy_name(self._policy), FALLBACK_TRIGGER, problem
            )
        return FALLBACK_TRIGGER.due_at_ms(progress)


# Flink's default: no limit, growing delays.
FALLBACK_RESTART = ExponentialDelayRestartStrategyConfiguration()


def decide_restart(
    policy: RestartPolicy, failures: FailureHistory, now_ms: int, random: Random
) -> RestartAt | NoRestart:
    """Ask a policy, or `FALLBACK_RESTART` if it raises or gives no decision."""
    try:
        answer: object = policy.decide(failures, now_ms, random)
        problem = f"it returned {answer!r}, which is neither RestartAt nor NoRestart"
    except Exception as error:  # noqa: BLE001 - a user's code may raise anything
        answer, problem = None, f"{type(error).__name__}: {error}"
    if isinstance(answer, RestartAt | NoRestart):
        return answer
    logger.warning("Restart policy %s failed, so %s applies: %s", policy_name(policy), FALLBACK_RESTART, problem)
    return FALLBACK_RESTART.decide(failures, now_ms, random)
