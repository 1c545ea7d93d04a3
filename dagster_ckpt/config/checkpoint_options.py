"""All checkpointing options of a stream, each declared once.

`CheckpointConfig`, `CheckpointSettings`, the overrides of a run, YAML fields and `docs/options.md` are made from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from dagster_ckpt.config.checkpoint_storage import CheckpointStorage, FileSystemCheckpointStorage
from dagster_ckpt.errors import OptionError
from dagster_ckpt.policies.retention import Latest, RetentionPolicy, checked_retention
from dagster_ckpt.policies.serialization import Written, read_retention, read_trigger
from dagster_ckpt.policies.trigger import Interval, TriggerPolicy, checked_trigger, known_interval_ms
from dagster_ckpt.values.modes import CheckpointingMode, ExternalizedCheckpointCleanup
from dagster_ckpt.values.storage_path import location_url
from dagster_ckpt.values.validation import (
    INT_MAX,
    TIMEDELTA_MAX_MS,
    Choice,
    Converted,
    Described,
    Effect,
    Milliseconds,
    Option,
    OptionDescription,
    Switch,
    WholeNumber,
    options_of,
    type_error,
)

MODE = Choice("checkpointing mode", CheckpointingMode)
CLEANUP = Choice("externalized checkpoint cleanup", ExternalizedCheckpointCleanup)
# Flink caps the minimum pause at one year.
MAX_PAUSE_MS = 365 * 24 * 3_600_000


def checked_storage(value: object) -> CheckpointStorage:
    if isinstance(value, str):
        return FileSystemCheckpointStorage(location_url("storage", value))
    if isinstance(value, CheckpointStorage):
        return value
    raise type_error("checkpoint storage", value, "a CheckpointStorage, or the absolute path or URL of a directory")


def _retention(value: object) -> RetentionPolicy:
    return read_retention(value) if isinstance(value, Mapping) else checked_retention(value)


def _trigger(value: object) -> TriggerPolicy:
    return read_trigger(value) if isinstance(value, Mapping) else checked_trigger(value)


def _of_mode(options: CheckpointOptions) -> Described:
    if options.mode is CheckpointingMode.EXACTLY_ONCE:
        return Effect.REAL, "Snapshots are cut at a committed micro-batch."
    return (
        Effect.MAPPED,
        "Snapshots do not wait for a batch boundary; the running batch may be planned again and its rows repeated.",
    )


def _of_interval(options: CheckpointOptions) -> Described:
    if options.trigger is not None:
        return Effect.NONE, "A trigger policy decides."
    if options.interval is None:
        return Effect.REAL, "No periodic checkpoints; manual checkpoints and savepoints work."
    return Effect.REAL, "The coordinator's period, independent of the micro-batch trigger."


def _of_min_pause(options: CheckpointOptions) -> Described:
    if not options.is_checkpointing_enabled:
        return Effect.NONE, "Not applicable: the pause applies to periodic checkpoints, which are off."
    return Effect.REAL, "Counted from the last completed snapshot to the next periodic attempt."


def _of_tolerable_failures(options: CheckpointOptions) -> Described:
    if options.tolerable_failures == INT_MAX:
        return Effect.REAL, "Failed checkpoints never fail the query."
    return Effect.REAL, "More consecutive failures than this fail the query, and the restart strategy takes over."


def _of_unaligned(options: CheckpointOptions) -> Described:
    if not options.unaligned:
        return Effect.REAL, "A snapshot waits for the running batch to commit."
    if options.mode is CheckpointingMode.AT_LEAST_ONCE:
        return Effect.NONE, "Off under AT_LEAST_ONCE, as in Flink: that mode never waits anyway."
    return (
        Effect.REAL,
        "A snapshot carries the running batch's planned offsets, and a restore replays exactly that batch.",
    )


def _if_unaligned(options: CheckpointOptions, explanation: str) -> Described:
    if options.unaligned and options.mode is CheckpointingMode.EXACTLY_ONCE:
        return Effect.REAL, explanation
    return Effect.NONE, "Not applicable while unaligned checkpoints are off."


def _of_alignment_timeout(options: CheckpointOptions) -> Described:
    return _if_unaligned(options, "An attempt waits for the batch boundary this long, then goes unaligned.")


def _of_force_unaligned(options: CheckpointOptions) -> Described:
    if options.force_unaligned:
        forced = "Unaligned with any sink; one that is not idempotent may see the replayed batch twice."
        return _if_unaligned(options, forced)
    return _if_unaligned(options, "Unaligned only if the sink is idempotent for a replayed batch.")


def _of_num_retained(options: CheckpointOptions) -> Described:
    if options.retention is not None:
        return Effect.NONE, "A retention policy decides."
    return Effect.REAL, "Older checkpoints are deleted once a newer one has completed."


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The options of one stream, with Flink's ranges and defaults. Durations are milliseconds or a timedelta."""

    mode: Option[CheckpointingMode | str, CheckpointingMode] = Option(
        MODE,
        default=CheckpointingMode.EXACTLY_ONCE,
        description="Guarantee after a restore.",
        effect=_of_mode,
    )
    interval: Option[int | timedelta | None, int | None] = Option(
        Milliseconds("checkpoint interval", minimum=10),
        default=None,
        unset="off",
        description="Time between periodic checkpoints, independent of Spark's trigger; requested ones need none.",
        effect=_of_interval,
    )
    timeout: Option[int | timedelta, int] = Option(
        Milliseconds("checkpoint timeout", minimum=10),
        default=600_000,
        description="Time after which a checkpoint attempt is aborted and its files are deleted.",
        effect="An attempt that takes longer is aborted, and its files are deleted.",
    )
    min_pause: Option[int | timedelta, int] = Option(
        Milliseconds("min pause between checkpoints", minimum=0),
        default=0,
        description="Minimum pause between the completion of a checkpoint and the next periodic attempt.",
        effect=_of_min_pause,
    )
    max_concurrent: Option[int, int] = Option(
        WholeNumber("max concurrent checkpoints", minimum=1),
        default=1,
        description="Maximum number of concurrent checkpoint attempts.",
        effect="Maximum number of checkpoints uploaded concurrently.",
    )
    tolerable_failures: Option[int, int] = Option(
        WholeNumber("tolerable checkpoint failure number", minimum=0),
        default=0,
        description="Number of consecutive checkpoint failures that do not fail the query; 2147483647: any number.",
        effect=_of_tolerable_failures,
    )
    cleanup: Option[ExternalizedCheckpointCleanup | str, ExternalizedCheckpointCleanup] = Option(
        CLEANUP,
        default=ExternalizedCheckpointCleanup.NO_EXTERNALIZED_CHECKPOINTS,
        description="Which checkpoints outlive the stream.",
        effect="Decides, by how the stream ended, whether its checkpoints are kept.",
    )
    unaligned: Option[bool, bool] = Option(
        Switch("unaligned checkpoints"),
        default=False,
        description="Take checkpoints without waiting for the end of the running batch.",
        effect=_of_unaligned,
    )
    alignment_timeout: Option[int | timedelta, int] = Option(
        Milliseconds("alignment timeout", minimum=0, maximum=TIMEDELTA_MAX_MS),
        default=0,
        description="With unaligned: how long to wait for the end of the batch first.",
        effect=_of_alignment_timeout,
    )
    force_unaligned: Option[bool, bool] = Option(
        Switch("force unaligned checkpoints"),
        default=False,
        description="With unaligned: allow it for sinks that are not idempotent, too.",
        effect=_of_force_unaligned,
    )
    num_retained: Option[int, int] = Option(
        WholeNumber("num_retained", minimum=1),
        default=1,
        description="Number of completed checkpoints to retain (execution.checkpointing.num-retained).",
        effect=_of_num_retained,
    )
    count_savepoints: Option[bool, bool] = Option(
        Switch("count savepoints"),
        default=False,
        description="Count savepoints among the retained checkpoints, so that they subsume checkpoints, as in Flink.",
        effect=(
            "A savepoint counts as one of the retained checkpoints, as in Flink; its files are kept.",
            "Savepoints do not count among the retained checkpoints.",
        ),
    )
    prefer_checkpoint_for_recovery: Option[bool, bool] = Option(
        Switch("prefer checkpoint for recovery"),
        default=False,
        description="Recover from the newest checkpoint even if a savepoint is newer.",
        effect=(
            "Recovery takes the newest checkpoint even if a savepoint is newer, and reports how far back it goes.",
            "Recovery takes the newest snapshot, checkpoint or savepoint.",
        ),
    )
    recovery_depth: Option[int | None, int | None] = Option(
        WholeNumber("recovery depth", minimum=1),
        default=None,
        unset="all",
        description="Maximum number of restore points that a recovery tries if the live directory is damaged; then it "
        "fails for good.",
        effect=(
            "After the live directory, a recovery that finds damage tries this many points, then fails for good.",
            "A recovery that finds damage tries every retained snapshot, the newest first.",
        ),
    )
    roll_back_tables: Option[bool, bool] = Option(
        Switch("roll back tables"),
        default=True,
        description="Roll Delta and Iceberg tables back to the batch that a start goes back to. If false, such a "
        "start is refused, and the message has the commands to run.",
        effect=(
            "A start that goes back rolls Delta and Iceberg tables back to the batch that it restores.",
            "A start that has to roll a Delta or Iceberg table back is refused with the commands to run.",
        ),
    )
    max_replayed_batches: Option[int, int] = Option(
        WholeNumber("max replayed batches", minimum=0),
        default=100,
        description="Maximum number of batches that a start replays exactly as they were planned after the live "
        "directory was lost, so that no sink is rolled back. 0: sinks are rolled back to the snapshot.",
        effect=(
            "After the loss of the live directory, batches that the sinks already have are replayed as they were "
            "planned, to restore the state; the sinks are not changed.",
            "After the loss of the live directory, sinks are rolled back to the snapshot that is restored.",
        ),
    )
    storage: Option[CheckpointStorage | str | None, CheckpointStorage | None] = Option(
        Converted(checked_storage, "a `CheckpointStorage`, or the URL of a directory", str),
        default=None,
        unset="the deployment's storage",
        description="Directory for the snapshots of this stream, as a URL or an absolute path.",
        effect=(
            "Snapshots are kept there, apart from Spark's own checkpoint directory.",
            "Snapshots are kept where the deployment says.",
        ),
    )
    retention: Option[RetentionPolicy | Written | None, RetentionPolicy | None] = Option(
        Converted(_retention, "a retention policy, or the same as data", dict[str, Any]),
        default=None,
        unset="num_retained",
        replaces="num_retained",
        description="Which completed checkpoints to keep, instead of num_retained: a policy by its name and arguments, "
        "such as {any_of: [{latest: 3}, {newest_per: {period: day, count: 7}}]}.",
        effect=(
            "Once a checkpoint has completed, those that the policy does not keep are deleted.",
            "num_retained decides.",
        ),
    )
    trigger: Option[TriggerPolicy | Written | None, TriggerPolicy | None] = Option(
        Converted(_trigger, "a trigger policy, or the same as data", dict[str, Any]),
        default=None,
        unset="interval",
        replaces="interval",
        description="When the next periodic checkpoint is due, instead of interval: a policy by its name and "
        "arguments, such as {any_of: [{interval: 60000}, {every_batches: 100}]}. min_pause holds as well.",
        effect=("A checkpoint is taken when the policy says that it is due.", "interval decides."),
    )

    @property
    def is_checkpointing_enabled(self) -> bool:
        return self.interval is not None or self.trigger is not None

    @property
    def retention_policy(self) -> RetentionPolicy:
        return self.retention if self.retention is not None else Latest(self.num_retained)

    @property
    def trigger_policy(self) -> TriggerPolicy | None:
        """When the next periodic checkpoint is due; None: never.

        As in Flink, the period is the longer of interval and minimum pause, and the first checkpoint is not due before
        the pause.
        """
        if self.trigger is not None or self.interval is None:
            return self.trigger
        pause_ms = self.effective_min_pause_ms
        return Interval(max(self.interval, pause_ms), first_after_ms=pause_ms)

    @property
    def known_interval_ms(self) -> int | None:
        """The time between periodic checkpoints; None: there are none, or it has no limit."""
        return self.interval if self.trigger is None else known_interval_ms(self.trigger)

    @property
    def effective_min_pause_ms(self) -> int:
        return min(self.min_pause, MAX_PAUSE_MS)

    def describe(self) -> list[OptionDescription]:
        return [option.described(self) for option in options_of(type(self)).values()]

    def overridden(self, given: Mapping[str, Any]) -> CheckpointOptions:
        """The options with some replaced, as for one run; None leaves an option as it is.

        A policy and the option that it replaces unset each other.
        """
        options = options_of(type(self))
        changes = {name: value for name, value in given.items() if value is not None}
        pairs = [(name, option.replaces) for name, option in options.items() if option.replaces is not None]
        for policy, plain in pairs:
            for mine, other in ((policy, plain), (plain, policy)):
                if mine in changes:
                    changes.setdefault(other, options[other].default)
        return replace(self, **changes).in_effect()

    def in_effect(self) -> CheckpointOptions:
        """Validate the options together and return them as they take effect.

        Unaligned checkpoints are turned off under AT_LEAST_ONCE: silently in Flink, while `describe` reports it.
        Refused are several concurrent unaligned attempts, and a policy together with the option that it replaces.
        """
        if self.trigger is not None and self.interval is not None:
            raise OptionError(
                f"checkpoint interval is {self.interval} ms, but must be left out where a trigger is set: give "
                f"one policy for both, such as trigger=Interval({self.interval}) | EveryBatches(100)."
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
