"""All checkpointing options of one stream as a frozen, validated value."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from dagster_ckpt.config.checkpoint_storage import CheckpointStorage
from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.policies.retention import Latest, RetentionPolicy, checked_retention
from dagster_ckpt.policies.trigger import Interval, TriggerPolicy, checked_trigger, known_interval_ms
from dagster_ckpt.values.modes import CheckpointingMode, ExternalizedCheckpointCleanup
from dagster_ckpt.values.validation import (
    INT_MAX,
    TIMEDELTA_MAX_MS,
    Choice,
    Effect,
    Milliseconds,
    OptionDescription,
    Switch,
    WholeNumber,
)

NUM_RETAINED = WholeNumber("num_retained", minimum=1)
MODE = Choice("checkpointing mode", CheckpointingMode)
INTERVAL = Milliseconds("checkpoint interval", minimum=10)
TIMEOUT = Milliseconds("checkpoint timeout", minimum=10)
MIN_PAUSE = Milliseconds("min pause between checkpoints", minimum=0)
MAX_CONCURRENT = WholeNumber("max concurrent checkpoints", minimum=1)
TOLERABLE_FAILURES = WholeNumber("tolerable checkpoint failure number", minimum=0)
CLEANUP = Choice("externalized checkpoint cleanup", ExternalizedCheckpointCleanup)
UNALIGNED = Switch("unaligned checkpoints")
ALIGNMENT_TIMEOUT = Milliseconds("alignment timeout", minimum=0, maximum=TIMEDELTA_MAX_MS)
FORCE_UNALIGNED = Switch("force unaligned checkpoints")
COUNT_SAVEPOINTS = Switch("count savepoints")
PREFER_CHECKPOINT = Switch("prefer checkpoint for recovery")
ROLL_BACK_TABLES = Switch("roll back tables")
MAX_REPLAYED_BATCHES = WholeNumber("max replayed batches", minimum=0)
RECOVERY_DEPTH = WholeNumber("recovery depth", minimum=1)
# A longer minimum pause has the effect of this one, as in Flink: one year.
MAX_PAUSE_MS = 365 * 24 * 3_600_000

_Allowed = WholeNumber | Switch | Choice[CheckpointingMode] | Choice[ExternalizedCheckpointCleanup]

_ALLOWED: dict[str, _Allowed] = {
    "mode": MODE,
    "timeout_ms": TIMEOUT,
    "min_pause_ms": MIN_PAUSE,
    "max_concurrent": MAX_CONCURRENT,
    "tolerable_failures": TOLERABLE_FAILURES,
    "cleanup": CLEANUP,
    "unaligned": UNALIGNED,
    "alignment_timeout_ms": ALIGNMENT_TIMEOUT,
    "force_unaligned": FORCE_UNALIGNED,
    "num_retained": NUM_RETAINED,
    "count_savepoints": COUNT_SAVEPOINTS,
    "prefer_checkpoint_for_recovery": PREFER_CHECKPOINT,
    "roll_back_tables": ROLL_BACK_TABLES,
    "max_replayed_batches": MAX_REPLAYED_BATCHES,
}


@dataclass(frozen=True)
class CheckpointOptions:
    """The options of one stream, with Flink's ranges and defaults.

    Each value is validated on construction; `in_effect` validates them together.

    Attributes:
        mode: The guarantee after a restore.
        interval_ms: Time between periodic checkpoints, from 10; None turns them off. Manual
            checkpoints and savepoints work either way.
        timeout_ms: Age at which an attempt is aborted, from 10.
        min_pause_ms: Minimum time from the last completion to the next periodic attempt.
        max_concurrent: Maximum number of concurrent attempts, from 1.
        tolerable_failures: Number of consecutive failures tolerated before the stream fails;
            2147483647 means unlimited.
        cleanup: Which checkpoints outlive the stream.
        unaligned: Do not wait for the running batch: the snapshot carries its planned offsets.
        alignment_timeout_ms: Wait for the batch boundary this long before going unaligned.
        force_unaligned: Go unaligned even if the sink does not write a replayed batch idempotently.
        num_retained: Number of completed checkpoints to retain, from 1.
        count_savepoints: Savepoints count toward `num_retained`, as in Flink.
        prefer_checkpoint_for_recovery: Recover from the newest checkpoint even if a savepoint is
            newer.
        recovery_depth: Maximum number of snapshots that an automatic recovery tries if the live
            directory is unusable, from 1; None tries all retained ones.
        roll_back_tables: A start that goes back rolls Delta and Iceberg tables back itself; False
            refuses it with the commands for a person to type.
        max_replayed_batches: After the loss of the live directory, a start replays at most this many
            batches exactly as they were planned, so that no sink is rolled back; 0 always rolls back.
        storage: Where snapshots are stored; None means the deployment decides.
        retention: Which completed checkpoints to keep while the stream runs, instead of
            `num_retained`: a policy of `dagster_ckpt.policies.retention` or your own.
        trigger: When the next periodic checkpoint is due, instead of `interval_ms`: a policy of
            `dagster_ckpt.policies.trigger` or your own. `min_pause_ms` holds as well.

    Raises:
        OptionError: A value is out of range.
        OptionTypeError: A value has the wrong type.
    """

    mode: CheckpointingMode = CheckpointingMode.EXACTLY_ONCE
    interval_ms: int | None = None
    timeout_ms: int = 600_000
    min_pause_ms: int = 0
    max_concurrent: int = 1
    tolerable_failures: int = 0
    cleanup: ExternalizedCheckpointCleanup = ExternalizedCheckpointCleanup.NO_EXTERNALIZED_CHECKPOINTS
    unaligned: bool = False
    alignment_timeout_ms: int = 0
    force_unaligned: bool = False
    num_retained: int = 1
    count_savepoints: bool = False
    prefer_checkpoint_for_recovery: bool = False
    recovery_depth: int | None = None
    roll_back_tables: bool = True
    max_replayed_batches: int = 100
    storage: CheckpointStorage | None = None
    retention: RetentionPolicy | None = None
    trigger: TriggerPolicy | None = None

    def __post_init__(self) -> None:
        """Validate each value separately."""
        for name, allowed in _ALLOWED.items():
            allowed.checked(getattr(self, name))
        if self.interval_ms is not None:
            INTERVAL.checked(self.interval_ms)
        if self.recovery_depth is not None:
            RECOVERY_DEPTH.checked(self.recovery_depth)
        if self.storage is not None and not isinstance(self.storage, CheckpointStorage):
            raise OptionTypeError(
                f"checkpoint storage is {self.storage!r} ({type(self.storage).__name__}), "
                "but must be a CheckpointStorage."
            )
        if self.retention is not None:
            checked_retention(self.retention)
        if self.trigger is not None:
            checked_trigger(self.trigger)

    @property
    def is_checkpointing_enabled(self) -> bool:
        """Whether periodic checkpoints are taken."""
        return self.interval_ms is not None or self.trigger is not None

    @property
    def retention_policy(self) -> RetentionPolicy:
        """Which completed checkpoints to keep while the stream runs."""
        return self.retention if self.retention is not None else Latest(self.num_retained)

    @property
    def trigger_policy(self) -> TriggerPolicy | None:
        """When the next periodic checkpoint is due; None takes none.

        As in Flink, the period is the longer of interval and minimum pause, and the first checkpoint
        is not due before the pause.
        """
        if self.trigger is not None or self.interval_ms is None:
            return self.trigger
        pause_ms = self.effective_min_pause_ms
        return Interval(max(self.interval_ms, pause_ms), first_after_ms=pause_ms)

    @property
    def known_interval_ms(self) -> int | None:
        """The time between periodic checkpoints; None if there are none, or if the trigger sets no limit."""
        return self.interval_ms if self.trigger is None else known_interval_ms(self.trigger)

    @property
    def effective_min_pause_ms(self) -> int:
        """The minimum pause, at most a year."""
        return min(self.min_pause_ms, MAX_PAUSE_MS)

    def in_effect(self) -> "CheckpointOptions":
        """Validate the options together and return them as they take effect.

        Unaligned checkpoints are off under AT_LEAST_ONCE, as in Flink, which turns them off
        silently; `describe` reports it. A minimum pause with several concurrent attempts is
        accepted, also as in Flink.

        Raises:
            OptionError: Unaligned checkpoints are on with several concurrent attempts, or a policy
                and the option that it replaces are both set.
        """
        if self.trigger is not None and self.interval_ms is not None:
            raise OptionError(
                f"checkpoint interval is {self.interval_ms} ms, but must be left out where a trigger is set: give "
                f"one policy for both, such as trigger=Interval({self.interval_ms}) | EveryBatches(100)."
            )
        if self.retention is not None and self.num_retained != CheckpointOptions.num_retained:
            raise OptionError(
                f"num_retained is {self.num_retained}, but must be left out where a retention is set: give one "
                f"policy for both, such as retention=Latest({self.num_retained}) | NewestPer('day', 7)."
            )
        if self.unaligned and self.mode is CheckpointingMode.AT_LEAST_ONCE:
            return replace(self, unaligned=False)
        if self.unaligned and self.max_concurrent > 1:
            raise OptionError(
                f"max concurrent checkpoints is {self.max_concurrent}, but must be 1 while "
                "unaligned checkpoints are on: set it to 1, or call disable_unaligned_checkpoints()."
            )
        return self


_Described = tuple[object, Effect, str]


def describe_options(requested: CheckpointOptions) -> list[OptionDescription]:
    """Return each option with its value and its effect on Spark, in the order of the documentation."""
    return [OptionDescription(option, *describe_option(requested)) for option, describe_option in _DESCRIBERS.items()]


def _mode(requested: CheckpointOptions) -> _Described:
    if requested.mode is CheckpointingMode.EXACTLY_ONCE:
        return requested.mode, Effect.REAL, "Snapshots are cut at a committed micro-batch."
    return (
        requested.mode,
        Effect.MAPPED,
        "Snapshots do not wait for a batch boundary; the running batch may be planned again and its rows repeated.",
    )


def _interval(requested: CheckpointOptions) -> _Described:
    if requested.trigger is not None:
        return requested.interval_ms, Effect.NONE, "A trigger policy decides."
    if requested.interval_ms is None:
        explanation = "No periodic checkpoints; manual checkpoints and savepoints work."
    else:
        explanation = "The coordinator's period, independent of the micro-batch trigger."
    return requested.interval_ms, Effect.REAL, explanation


def _timeout(requested: CheckpointOptions) -> _Described:
    return requested.timeout_ms, Effect.REAL, "An attempt that takes longer is aborted, and its files are deleted."


def _min_pause(requested: CheckpointOptions) -> _Described:
    if not requested.is_checkpointing_enabled:
        return (
            requested.min_pause_ms,
            Effect.NONE,
            "Not applicable: the pause applies to periodic checkpoints, which are off.",
        )
    return (
        requested.min_pause_ms,
        Effect.REAL,
        "Counted from the last completed snapshot to the next periodic attempt.",
    )


def _max_concurrent(requested: CheckpointOptions) -> _Described:
    return requested.max_concurrent, Effect.REAL, "Maximum number of checkpoints uploaded concurrently."


def _tolerable_failures(requested: CheckpointOptions) -> _Described:
    if requested.tolerable_failures == INT_MAX:
        explanation = "Failed checkpoints never fail the query."
    else:
        explanation = "More consecutive failures than this fail the query, and the restart strategy takes over."
    return requested.tolerable_failures, Effect.REAL, explanation


def _cleanup(requested: CheckpointOptions) -> _Described:
    return requested.cleanup, Effect.REAL, "Decides, by how the stream ended, whether its checkpoints are kept."


def _unaligned(requested: CheckpointOptions) -> _Described:
    if requested.unaligned and requested.mode is CheckpointingMode.AT_LEAST_ONCE:
        return (
            requested.unaligned,
            Effect.NONE,
            "Off under AT_LEAST_ONCE, as in Flink: that mode never waits anyway.",
        )
    if requested.unaligned:
        return (
            requested.unaligned,
            Effect.REAL,
            "A snapshot carries the running batch's planned offsets, and a restore replays exactly that batch.",
        )
    return requested.unaligned, Effect.REAL, "A snapshot waits for the running batch to commit."


def _goes_unaligned(requested: CheckpointOptions) -> bool:
    return requested.unaligned and requested.mode is CheckpointingMode.EXACTLY_ONCE


def _alignment_timeout(requested: CheckpointOptions) -> _Described:
    if not _goes_unaligned(requested):
        return requested.alignment_timeout_ms, Effect.NONE, "Not applicable while unaligned checkpoints are off."
    return (
        requested.alignment_timeout_ms,
        Effect.REAL,
        "An attempt waits for the batch boundary this long, then goes unaligned.",
    )


def _force_unaligned(requested: CheckpointOptions) -> _Described:
    if not _goes_unaligned(requested):
        return requested.force_unaligned, Effect.NONE, "Not applicable while unaligned checkpoints are off."
    if requested.force_unaligned:
        explanation = "Unaligned with any sink; one that is not idempotent may see the replayed batch twice."
    else:
        explanation = "Unaligned only if the sink is idempotent for a replayed batch."
    return requested.force_unaligned, Effect.REAL, explanation


def _num_retained(requested: CheckpointOptions) -> _Described:
    if requested.retention is not None:
        return requested.num_retained, Effect.NONE, "A retention policy decides."
    return requested.num_retained, Effect.REAL, "Older checkpoints are deleted once a newer one has completed."


def _count_savepoints(requested: CheckpointOptions) -> _Described:
    if requested.count_savepoints:
        explanation = "A savepoint counts as one of the retained checkpoints, as in Flink; its files are kept."
    else:
        explanation = "Savepoints do not count among the retained checkpoints."
    return requested.count_savepoints, Effect.REAL, explanation


def _prefer_checkpoint(requested: CheckpointOptions) -> _Described:
    if requested.prefer_checkpoint_for_recovery:
        explanation = (
            "Recovery takes the newest checkpoint even if a savepoint is newer, and reports how far back it goes."
        )
    else:
        explanation = "Recovery takes the newest snapshot, checkpoint or savepoint."
    return requested.prefer_checkpoint_for_recovery, Effect.REAL, explanation


def _recovery_depth(requested: CheckpointOptions) -> _Described:
    if requested.recovery_depth is None:
        explanation = "A recovery that finds damage tries every retained snapshot, the newest first."
    else:
        explanation = (
            "After the live directory, a recovery that finds damage tries this many points, then fails for good."
        )
    return requested.recovery_depth, Effect.REAL, explanation


def _roll_back_tables(requested: CheckpointOptions) -> _Described:
    if requested.roll_back_tables:
        explanation = "A start that goes back rolls Delta and Iceberg tables back to the batch that it restores."
    else:
        explanation = "A start that has to roll a Delta or Iceberg table back is refused with the commands to run."
    return requested.roll_back_tables, Effect.REAL, explanation


def _max_replayed_batches(requested: CheckpointOptions) -> _Described:
    if requested.max_replayed_batches:
        explanation = (
            "After the loss of the live directory, batches that the sinks already have are replayed as they were "
            "planned, to restore the state; the sinks are not changed."
        )
    else:
        explanation = "After the loss of the live directory, sinks are rolled back to the snapshot that is restored."
    return requested.max_replayed_batches, Effect.REAL, explanation


def _storage(requested: CheckpointOptions) -> _Described:
    if requested.storage is None:
        return requested.storage, Effect.REAL, "Snapshots are kept where the deployment says."
    return requested.storage, Effect.REAL, "Snapshots are kept there, apart from Spark's own checkpoint directory."


def _retention(requested: CheckpointOptions) -> _Described:
    explanation = (
        "num_retained decides."
        if requested.retention is None
        else "Once a checkpoint has completed, those that the policy does not keep are deleted."
    )
    return requested.retention, Effect.REAL, explanation


def _trigger(requested: CheckpointOptions) -> _Described:
    explanation = (
        "interval decides."
        if requested.trigger is None
        else "A checkpoint is taken when the policy says that it is due."
    )
    return requested.trigger, Effect.REAL, explanation


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
    "roll_back_tables": _roll_back_tables,
    "max_replayed_batches": _max_replayed_batches,
    "storage": _storage,
    "retention": _retention,
    "trigger": _trigger,
}
