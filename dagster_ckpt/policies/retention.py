"""Which images are kept when a job ends, and which one makes room when a new one completes.

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
    """What an image in the retained queue is.

    Attributes:
        CHECKPOINT: Taken by the system, deleted once subsumed.
        SAVEPOINT: Asked for by a person; leaves the queue, but its data is never deleted.
        STOP_WITH_SAVEPOINT: A savepoint after which the job takes no further image.
    """

    CHECKPOINT = "CHECKPOINT"
    SAVEPOINT = "SAVEPOINT"
    STOP_WITH_SAVEPOINT = "STOP_WITH_SAVEPOINT"


@dataclass(frozen=True)
class Retained:
    """One completed image that a job could recover from.

    Attributes:
        image_id: Its id.
        kind: What it is.
    """

    image_id: str
    kind: RetainedKind = RetainedKind.CHECKPOINT


def images_to_keep_at(state: TerminalState, cleanup: ExternalizedCheckpointCleanup) -> bool:
    """Tell whether a job's checkpoints are kept at its end. Savepoints always are, so do not ask for them.

    Args:
        state: How the job ended. A job that stopped with a savepoint is FINISHED: its savepoint
            stays, its checkpoints go, whatever the policy.
        cleanup: The policy.
    """
    return state in _KEPT_AT[cleanup]


def deletes_live_directory(state: TerminalState, cleanup: ExternalizedCheckpointCleanup) -> bool:
    """Tell whether Spark's own checkpoint directory is deleted with the images.

    Only a cancellation under DELETE_ON_CANCELLATION says that nothing of the job is to remain.
    """
    return state is TerminalState.CANCELED and cleanup is ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION


def subsumed(images: Sequence[Retained], num_retained: int, *, count_savepoints: bool = False) -> list[Retained]:
    """Return the images that leave the retained queue, oldest first.

    The newest image never leaves. The newest checkpoint stays too, because later incremental ones may
    refer to its bytes, unless the job has stopped with a savepoint and takes no more. So more than
    `num_retained` may be left.

    Args:
        images: The completed images of the job, oldest first.
        num_retained: How many to keep, 1 or more.
        count_savepoints: Savepoints stand in the queue and push checkpoints out of it, as in Flink. Otherwise
            `num_retained` checkpoints are kept, however many savepoints lie between them.

    Returns:
        What to take out. The bytes of a checkpoint are then deleted, those of a savepoint never.

    Raises:
        OptionError: `num_retained` is below 1.

    Example:
        >>> queue = [Retained("chk-1"), Retained("chk-2"), Retained("sp", RetainedKind.SAVEPOINT)]
        >>> [image.image_id for image in subsumed(queue, 2)]
        []
        >>> [image.image_id for image in subsumed(queue, 2, count_savepoints=True)]
        ['chk-1']
    """
    if not count_savepoints:
        images = [image for image in images if image.kind is RetainedKind.CHECKPOINT]
    excess = len(images) - NUM_RETAINED.checked(num_retained)
    if excess <= 0:
        return []
    newest = images[-1]
    kept = {newest.image_id}
    newest_checkpoint = _newest_checkpoint(images)
    if newest_checkpoint is not None and newest.kind is not RetainedKind.STOP_WITH_SAVEPOINT:
        kept.add(newest_checkpoint.image_id)
    return [image for image in images if image.image_id not in kept][:excess]


def image_to_recover_from(images: Sequence[Retained], *, prefer_checkpoint: bool) -> Retained | None:
    """Return the image that a recovery takes, or None where there is none.

    It is the newest one. With `prefer_checkpoint` it is the newest checkpoint, even where a savepoint
    is newer: the job then repeats what it did since, so the caller shows how far it goes back.

    Args:
        images: The completed images of the job, oldest first.
        prefer_checkpoint: The option `prefer_checkpoint_for_recovery`.
    """
    if not images:
        return None
    if not prefer_checkpoint:
        return images[-1]
    return _newest_checkpoint(images) or images[-1]


def _newest_checkpoint(images: Sequence[Retained]) -> Retained | None:
    return next((image for image in reversed(images) if image.kind is RetainedKind.CHECKPOINT), None)
