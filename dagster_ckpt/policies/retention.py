"""Which snapshots are kept when a stream ends, and which one makes room when a new one completes.

Pure rules over values. The table is that of Flink's `CheckpointProperties`, the queue that of its
`CheckpointSubsumeHelper`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from dagster_ckpt.config.checkpoint_options import NUM_RETAINED
from dagster_ckpt.config.modes import ExternalizedCheckpointCleanup, TerminalState

_KEPT_AT: dict[ExternalizedCheckpointCleanup, frozenset[TerminalState]] = {
    ExternalizedCheckpointCleanup.NO_EXTERNALIZED_CHECKPOINTS: frozenset(),
    ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION: frozenset({TerminalState.FAILED}),
    ExternalizedCheckpointCleanup.RETAIN_ON_CANCELLATION: frozenset(
        {TerminalState.CANCELED, TerminalState.FAILED, TerminalState.SUSPENDED}
    ),
}


class RetainedKind(Enum):
    """What a snapshot in the retained queue is.

    Attributes:
        CHECKPOINT: Taken by the system, deleted once subsumed.
        SAVEPOINT: Asked for by a person; leaves the queue, but its data is never deleted.
        STOP_WITH_SAVEPOINT: A savepoint after which the stream takes no further snapshot.
    """

    CHECKPOINT = "CHECKPOINT"
    SAVEPOINT = "SAVEPOINT"
    STOP_WITH_SAVEPOINT = "STOP_WITH_SAVEPOINT"


@dataclass(frozen=True)
class Retained:
    """One completed snapshot that a stream could recover from.

    Attributes:
        snapshot_id: Its id.
        kind: What it is.
    """

    snapshot_id: str
    kind: RetainedKind = RetainedKind.CHECKPOINT


def snapshots_to_keep_at(state: TerminalState, cleanup: ExternalizedCheckpointCleanup) -> bool:
    """Tell whether a stream's checkpoints are kept at its end. Savepoints always are, so do not ask for them.

    Args:
        state: How the stream ended. A stream that stopped with a savepoint is FINISHED: its savepoint
            stays, its checkpoints go, whatever the policy.
        cleanup: The policy.
    """
    return state in _KEPT_AT[cleanup]


def deletes_live_directory(state: TerminalState, cleanup: ExternalizedCheckpointCleanup) -> bool:
    """Tell whether Spark's own checkpoint directory is deleted with the snapshots.

    Only a cancellation under DELETE_ON_CANCELLATION says that nothing of the stream is to remain.
    """
    return state is TerminalState.CANCELED and cleanup is ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION


def subsumed(snapshots: Sequence[Retained], num_retained: int, *, count_savepoints: bool = False) -> list[Retained]:
    """Return the snapshots that leave the retained queue, oldest first.

    The newest snapshot never leaves. The newest checkpoint stays too, because later incremental ones may
    refer to its bytes, unless the stream has stopped with a savepoint and takes no more. So more than
    `num_retained` may be left.

    Args:
        snapshots: The completed snapshots of the stream, oldest first.
        num_retained: How many to keep, 1 or more.
        count_savepoints: Savepoints stand in the queue and push checkpoints out of it, as in Flink. Otherwise
            `num_retained` checkpoints are kept, however many savepoints lie between them.

    Returns:
        What to take out. The bytes of a checkpoint are then deleted, those of a savepoint never.

    Raises:
        OptionError: `num_retained` is below 1.

    Example:
        >>> queue = [Retained("chk-1"), Retained("chk-2"), Retained("sp", RetainedKind.SAVEPOINT)]
        >>> [snapshot.snapshot_id for snapshot in subsumed(queue, 2)]
        []
        >>> [snapshot.snapshot_id for snapshot in subsumed(queue, 2, count_savepoints=True)]
        ['chk-1']
    """
    if not count_savepoints:
        snapshots = [snapshot for snapshot in snapshots if snapshot.kind is RetainedKind.CHECKPOINT]
    excess = len(snapshots) - NUM_RETAINED.checked(num_retained)
    if excess <= 0:
        return []
    newest = snapshots[-1]
    kept = {newest.snapshot_id}
    newest_checkpoint = _newest_checkpoint(snapshots)
    if newest_checkpoint is not None and newest.kind is not RetainedKind.STOP_WITH_SAVEPOINT:
        kept.add(newest_checkpoint.snapshot_id)
    return [snapshot for snapshot in snapshots if snapshot.snapshot_id not in kept][:excess]


def snapshot_to_recover_from(snapshots: Sequence[Retained], *, prefer_checkpoint: bool) -> Retained | None:
    """Return the snapshot that a recovery takes, or None where there is none.

    It is the newest one. With `prefer_checkpoint` it is the newest checkpoint, even where a savepoint
    is newer: the stream then repeats what it did since, so the caller shows how far it goes back.

    Args:
        snapshots: The completed snapshots of the stream, oldest first.
        prefer_checkpoint: The option `prefer_checkpoint_for_recovery`.
    """
    if not snapshots:
        return None
    if not prefer_checkpoint:
        return snapshots[-1]
    return _newest_checkpoint(snapshots) or snapshots[-1]


def _newest_checkpoint(snapshots: Sequence[Retained]) -> Retained | None:
    return next((snapshot for snapshot in reversed(snapshots) if snapshot.kind is RetainedKind.CHECKPOINT), None)
