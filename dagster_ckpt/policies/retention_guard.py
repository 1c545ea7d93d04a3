"""The guard around retention policies: what a recovery needs stays, whatever a policy answers or raises."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from dagster_ckpt.policies.naming import policy_name
from dagster_ckpt.policies.retention import RetainedKind, RetainedSnapshot, RetentionContext, RetentionPolicy

logger = logging.getLogger(__name__)


class KeptBecause(Enum):
    """Why a snapshot stays.

    Attributes:
        POLICY: The policy keeps it.
        NEWEST: A recovery may need it: the newest snapshot, or the newest checkpoint.
        IN_USE: Something refers to it, and the caller says so.
        POLICY_FAILED: The policy raised or gave no usable answer, so everything stays.
    """

    POLICY = "POLICY"
    NEWEST = "NEWEST"
    IN_USE = "IN_USE"
    POLICY_FAILED = "POLICY_FAILED"


@dataclass(frozen=True)
class RetentionDecision:
    """What a policy and its guard decided.

    Attributes:
        kept: The reason for each snapshot that stays, by id.
        dropped: The snapshots that do not stay, oldest first.
        problem: Why the policy's answer was not used, or None.
    """

    kept: Mapping[str, KeptBecause]
    dropped: tuple[RetainedSnapshot, ...] = ()
    problem: str | None = field(default=None, compare=False)


def needed_for_recovery(snapshots: Sequence[RetainedSnapshot]) -> dict[str, KeptBecause]:
    """The snapshots that no policy of a stream may drop.

    They are the newest one, and the newest checkpoint: a user may delete a savepoint at any time,
    and later incremental checkpoints may refer to the bytes of the newest checkpoint. As in Flink,
    a stream that has stopped with a savepoint needs no checkpoint.

    Args:
        snapshots: The snapshots, oldest first.
    """
    if not snapshots:
        return {}
    newest, checkpoint = snapshots[-1], _newest_checkpoint(snapshots)
    needed = {newest.snapshot_id: KeptBecause.NEWEST}
    if checkpoint is not None and newest.kind is not RetainedKind.STOP_WITH_SAVEPOINT:
        needed[checkpoint.snapshot_id] = KeptBecause.NEWEST
    return needed


def needed_of_history(savepoints: Sequence[RetainedSnapshot], held: Collection[str]) -> dict[str, KeptBecause]:
    """The savepoints of a schedule that no history may drop: those that are held, and the newest one.

    Args:
        savepoints: The savepoints of the schedule, oldest first.
        held: Ids of the savepoints that something refers to.
    """
    newest = {snapshot.snapshot_id: KeptBecause.NEWEST for snapshot in savepoints[-1:]}
    return newest | dict.fromkeys(held, KeptBecause.IN_USE)


def decide_retention(
    policy: RetentionPolicy,
    snapshots: Sequence[RetainedSnapshot],
    context: RetentionContext,
    *,
    needed: Mapping[str, KeptBecause],
) -> RetentionDecision:
    """Ask a policy which snapshots stay, and keep those that are needed whatever it answers.

    A policy that raises, or answers with anything but some of the given snapshots, drops nothing.
    The problem is logged, and the next pass asks again.

    Args:
        policy: The policy.
        snapshots: The snapshots that it decides about, oldest first.
        context: The time, and how the stream ended.
        needed: Snapshots that stay whatever the policy answers, by id.

    Example:
        >>> from dagster_ckpt.policies.retention import Latest
        >>> queue = [RetainedSnapshot("chk-1"), RetainedSnapshot("chk-2"), RetainedSnapshot("chk-3")]
        >>> decision = decide_retention(Latest(1), queue, RetentionContext(0), needed=needed_for_recovery(queue))
        >>> [snapshot.snapshot_id for snapshot in decision.dropped]
        ['chk-1', 'chk-2']
    """
    try:
        answer = frozenset(policy.keep(tuple(snapshots), context))
        strangers = answer - frozenset(snapshots)
        problem = f"it answers with {next(iter(strangers))!r}, which is none of the snapshots" if strangers else None
    except Exception as error:  # noqa: BLE001 - a policy is a user's code: whatever it raises must delete nothing
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
    """Return the snapshot that a recovery uses, or None if there is none.

    This is the newest one. With `prefer_checkpoint` it is the newest checkpoint, even if a
    savepoint is newer. The stream then reprocesses everything since that checkpoint, so the caller
    reports how far it goes back.

    Args:
        snapshots: The completed snapshots of the stream, oldest first.
        prefer_checkpoint: The option `prefer_checkpoint_for_recovery`.
    """
    if not snapshots:
        return None
    if not prefer_checkpoint:
        return snapshots[-1]
    return _newest_checkpoint(snapshots) or snapshots[-1]


def _newest_checkpoint(snapshots: Sequence[RetainedSnapshot]) -> RetainedSnapshot | None:
    return next((snapshot for snapshot in reversed(snapshots) if snapshot.kind is RetainedKind.CHECKPOINT), None)
