"""Retention: which snapshots a stream keeps at its end, and which ones a new snapshot subsumes.

Pure functions over values. The table is that of Flink's `CheckpointProperties`, the queue that of
its `CheckpointSubsumeHelper`.
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
    """Kind of a snapshot in the retained queue.

    Attributes:
        CHECKPOINT: Taken by the system, deleted once subsumed.
        SAVEPOINT: Requested by a user; leaves the queue, but its data is never deleted.
        STOP_WITH_SAVEPOINT: A savepoint after which the stream takes no further snapshot.
    """

    CHECKPOINT = "CHECKPOINT"
    SAVEPOINT = "SAVEPOINT"
    STOP_WITH_SAVEPOINT = "STOP_WITH_SAVEPOINT"


@dataclass(frozen=True)
class Retained:
    """One completed snapshot that a stream could recover from.

    Attributes:
        snapshot_id: Id of the snapshot.
        kind: Its kind.
    """

    snapshot_id: str
    kind: RetainedKind = RetainedKind.CHECKPOINT


def snapshots_to_keep_at(state: TerminalState, cleanup: ExternalizedCheckpointCleanup) -> bool:
    """Return whether a stream keeps its checkpoints when it ends. Savepoints are always kept.

    Args:
        state: How the stream ended. A stream that stopped with a savepoint is FINISHED: the
            savepoint is kept and the checkpoints are deleted under every policy.
        cleanup: The policy.
    """
    return state in _KEPT_AT[cleanup]


def deletes_live_directory(state: TerminalState, cleanup: ExternalizedCheckpointCleanup) -> bool:
    """Return whether Spark's own checkpoint directory is deleted along with the snapshots.

    This is so only for a cancellation under DELETE_ON_CANCELLATION, which removes everything of the
    stream.
    """
    return state is TerminalState.CANCELED and cleanup is ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION


def subsumed(snapshots: Sequence[Retained], num_retained: int, *, count_savepoints: bool = False) -> list[Retained]:
    """Return the snapshots that leave the retained queue, oldest first.

    The newest snapshot is never subsumed. Neither is the newest checkpoint, because later
    incremental checkpoints may refer to its bytes, unless the stream has stopped with a savepoint.
    More than `num_retained` snapshots may therefore remain.

    Args:
        snapshots: The completed snapshots of the stream, oldest first.
        num_retained: Number of snapshots to retain, from 1.
        count_savepoints: Savepoints count in the queue and subsume checkpoints, as in Flink.
            Otherwise `num_retained` checkpoints are retained, regardless of savepoints between
            them.

    Returns:
        The snapshots to remove from the queue. The caller then deletes the bytes of the
        checkpoints, but never those of savepoints.

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


def _newest_checkpoint(snapshots: Sequence[Retained]) -> Retained | None:
    return next((snapshot for snapshot in reversed(snapshots) if snapshot.kind is RetainedKind.CHECKPOINT), None)
