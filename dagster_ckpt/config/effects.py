"""The effect of each checkpointing option on a Spark query, so that no option is silently ignored."""

from collections.abc import Callable

from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.config.modes import CheckpointingMode
from dagster_ckpt.config.option_description import Effect, OptionDescription
from dagster_ckpt.config.validation import INT_MAX

_Described = tuple[object, Effect, str]


def describe_options(asked: CheckpointOptions) -> list[OptionDescription]:
    """Return each option with its value and its effect on Spark, in the order of the documentation."""
    return [OptionDescription(option, *describe_option(asked)) for option, describe_option in _DESCRIBERS.items()]


def _mode(asked: CheckpointOptions) -> _Described:
    if asked.mode is CheckpointingMode.EXACTLY_ONCE:
        return asked.mode, Effect.REAL, "Snapshots are cut at a committed micro-batch."
    return (
        asked.mode,
        Effect.MAPPED,
        "Snapshots do not wait for a batch boundary; the running batch may be planned again and its rows repeated.",
    )


def _interval(asked: CheckpointOptions) -> _Described:
    if asked.trigger is not None:
        return asked.interval_ms, Effect.NONE, "A trigger policy decides."
    if asked.interval_ms is None:
        explanation = "No periodic checkpoints; manual checkpoints and savepoints work."
    else:
        explanation = "The coordinator's period, independent of the micro-batch trigger."
    return asked.interval_ms, Effect.REAL, explanation


def _timeout(asked: CheckpointOptions) -> _Described:
    return asked.timeout_ms, Effect.REAL, "An attempt that takes longer is aborted, and its files are deleted."


def _min_pause(asked: CheckpointOptions) -> _Described:
    if not asked.is_checkpointing_enabled:
        return asked.min_pause_ms, Effect.NONE, "Only periodic checkpoints keep a pause, and there are none."
    return (
        asked.min_pause_ms,
        Effect.REAL,
        "Counted from the last completed snapshot to the next periodic attempt.",
    )


def _max_concurrent(asked: CheckpointOptions) -> _Described:
    return asked.max_concurrent, Effect.REAL, "Maximum number of checkpoints uploaded concurrently."


def _tolerable_failures(asked: CheckpointOptions) -> _Described:
    if asked.tolerable_failures == INT_MAX:
        explanation = "Failed checkpoints never fail the query."
    else:
        explanation = "More consecutive failures than this fail the query, and the restart strategy takes over."
    return asked.tolerable_failures, Effect.REAL, explanation


def _cleanup(asked: CheckpointOptions) -> _Described:
    return asked.cleanup, Effect.REAL, "Decides, by how the stream ended, whether its checkpoints are kept."


def _unaligned(asked: CheckpointOptions) -> _Described:
    if asked.unaligned and asked.mode is CheckpointingMode.AT_LEAST_ONCE:
        return (
            asked.unaligned,
            Effect.NONE,
            "Off under AT_LEAST_ONCE, as in Flink: that mode never waits anyway.",
        )
    if asked.unaligned:
        return (
            asked.unaligned,
            Effect.REAL,
            "A snapshot carries the running batch's planned offsets, and a restore replays exactly that.",
        )
    return asked.unaligned, Effect.REAL, "A snapshot waits for the running batch to commit."


def _goes_unaligned(asked: CheckpointOptions) -> bool:
    return asked.unaligned and asked.mode is CheckpointingMode.EXACTLY_ONCE


def _alignment_timeout(asked: CheckpointOptions) -> _Described:
    if not _goes_unaligned(asked):
        return asked.alignment_timeout_ms, Effect.NONE, "Not applicable while unaligned checkpoints are off."
    return (
        asked.alignment_timeout_ms,
        Effect.REAL,
        "An attempt waits for the batch boundary this long, then goes unaligned.",
    )


def _force_unaligned(asked: CheckpointOptions) -> _Described:
    if not _goes_unaligned(asked):
        return asked.force_unaligned, Effect.NONE, "Not applicable while unaligned checkpoints are off."
    if asked.force_unaligned:
        explanation = "Unaligned with any sink; one that is not idempotent may see the replayed batch twice."
    else:
        explanation = "Unaligned only where the sink takes a replayed batch idempotently."
    return asked.force_unaligned, Effect.REAL, explanation


def _num_retained(asked: CheckpointOptions) -> _Described:
    if asked.retention is not None:
        return asked.num_retained, Effect.NONE, "A retention policy decides."
    return asked.num_retained, Effect.REAL, "Older checkpoints are deleted once a newer one has completed."


def _count_savepoints(asked: CheckpointOptions) -> _Described:
    if asked.count_savepoints:
        explanation = "A savepoint takes the place of a checkpoint among those retained, as in Flink; its bytes stay."
    else:
        explanation = "Savepoints do not count among the retained checkpoints."
    return asked.count_savepoints, Effect.REAL, explanation


def _prefer_checkpoint(asked: CheckpointOptions) -> _Described:
    if asked.prefer_checkpoint_for_recovery:
        explanation = (
            "Recovery takes the newest checkpoint even if a savepoint is newer, and reports how far back it goes."
        )
    else:
        explanation = "Recovery takes the newest snapshot, checkpoint or savepoint."
    return asked.prefer_checkpoint_for_recovery, Effect.REAL, explanation


def _recovery_depth(asked: CheckpointOptions) -> _Described:
    if asked.recovery_depth is None:
        explanation = "A recovery that finds damage tries every retained snapshot, the newest first."
    else:
        explanation = (
            "A recovery that finds damage tries so many points beside the live directory, then fails for good."
        )
    return asked.recovery_depth, Effect.REAL, explanation


def _storage(asked: CheckpointOptions) -> _Described:
    if asked.storage is None:
        return asked.storage, Effect.REAL, "Snapshots are kept where the deployment says."
    return asked.storage, Effect.REAL, "Snapshots are kept there, apart from Spark's own checkpoint directory."


def _retention(asked: CheckpointOptions) -> _Described:
    explanation = (
        "num_retained decides."
        if asked.retention is None
        else "Once a checkpoint has completed, those that the policy does not keep are deleted."
    )
    return asked.retention, Effect.REAL, explanation


def _trigger(asked: CheckpointOptions) -> _Described:
    explanation = (
        "interval decides." if asked.trigger is None else "A checkpoint is taken when the policy says that it is due."
    )
    return asked.trigger, Effect.REAL, explanation


_DESCRIBERS: dict[str, Callable[[CheckpointOptions], _Described]] = {
    "mode": _mode,
    "interval": _interval,
    "timeout": _timeout,
    "min_pause": _min_pause,
    "max_concurrent": _max_concurrent,
    "tolerable_failures": _tolerable_failures,
    "cleanup": _cleanup,
    "unaligned": _unaligned,
    "alignment_timeout": _alignment_timeout,
    "force_unaligned": _force_unaligned,
    "num_retained": _num_retained,
    "count_savepoints": _count_savepoints,
    "prefer_checkpoint_for_recovery": _prefer_checkpoint,
    "recovery_depth": _recovery_depth,
    "storage": _storage,
    "retention": _retention,
    "trigger": _trigger,
}
