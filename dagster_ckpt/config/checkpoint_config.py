"""`CheckpointConfig`: the checkpointing options of a stream, as keywords and as PyFlink's setters."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, Concatenate, ParamSpec, Self

from dagster_ckpt.config.checkpoint_options import CLEANUP, MODE, CheckpointOptions
from dagster_ckpt.config.checkpoint_storage import CheckpointStorage, FileSystemCheckpointStorage
from dagster_ckpt.policies.retention import RetentionPolicy
from dagster_ckpt.policies.trigger import TriggerPolicy
from dagster_ckpt.values.durations import Duration
from dagster_ckpt.values.modes import (
    CheckpointingMode,
    ExternalizedCheckpointCleanup,
    ExternalizedCheckpointRetention,
)
from dagster_ckpt.values.validation import (
    INT_MAX,
    Choice,
    OptionDescription,
    Switch,
    did_you_mean,
    options_of,
    type_error,
)

__all__ = ["CheckpointConfig", "CheckpointOptions"]

_FAIL_ON_ERRORS = Switch("fail on checkpointing errors")
_RETENTION = Choice("externalized checkpoint retention", ExternalizedCheckpointRetention)

Keywords = ParamSpec("Keywords")


def _keywords_of(
    kind: Callable[Keywords, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Keywords], None]]:
    def decorate(constructor: Callable[..., None]) -> Callable[Concatenate[Any, Keywords], None]:
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.signature(kind)
        constructor.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[own, *signature.parameters.values()]
        )
        return constructor

    return decorate


class CheckpointConfig:
    """PyFlink's `CheckpointConfig`: keywords, getters and setters over one `CheckpointOptions`.

    `docs/options.md` describes the keywords. Setters return the object; an invalid value leaves it unchanged.

    Example:
        >>> plain = CheckpointConfig(interval=60_000, min_pause=timedelta(seconds=30))
        >>> pyflink = CheckpointConfig()
        >>> _ = pyflink.set_checkpoint_interval(60000).set_min_pause_between_checkpoints(30000)
        >>> plain == pyflink
        True
    """

    DEFAULT_MODE: ClassVar[CheckpointingMode] = CheckpointOptions.mode
    DEFAULT_TIMEOUT: ClassVar[int] = CheckpointOptions.timeout
    DEFAULT_MIN_PAUSE_BETWEEN_CHECKPOINTS: ClassVar[int] = CheckpointOptions.min_pause
    DEFAULT_MAX_CONCURRENT_CHECKPOINTS: ClassVar[int] = CheckpointOptions.max_concurrent

    # Mutable and compared by value, so not hashable.
    __hash__ = None  # type: ignore[assignment]

    @_keywords_of(CheckpointOptions)
    def __init__(self, **options: Any) -> None:
        for name in options:
            if name not in CheckpointOptions.__dataclass_fields__:
                hint = did_you_mean(name, CheckpointOptions.__dataclass_fields__)
                raise TypeError(f"CheckpointConfig() got an unexpected keyword argument {name!r}.{hint}")
        self._asked = CheckpointOptions(**options)
        self._is_tolerance_set = self._asked.tolerable_failures != CheckpointOptions.tolerable_failures

    @property
    def requested(self) -> CheckpointOptions:
        """The options as they were set, each validated separately."""
        return self._asked

    @property
    def options(self) -> CheckpointOptions:
        """The options in effect, validated together."""
        return self._asked.in_effect()

    def validate(self) -> None:
        self._asked.in_effect()

    def describe(self) -> list[OptionDescription]:
        return self._asked.describe()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckpointConfig) and self._asked == other._asked

    def __repr__(self) -> str:
        return f"CheckpointConfig({self._asked!r})"

    def is_checkpointing_enabled(self) -> bool:
        return self._asked.is_checkpointing_enabled

    def get_checkpointing_mode(self) -> CheckpointingMode:
        return self._asked.mode

    def set_checkpointing_mode(self, checkpointing_mode: CheckpointingMode) -> Self:
        """Set the guarantee after a restore."""
        return self._with(mode=MODE.member(checkpointing_mode))

    def get_checkpoint_interval(self) -> int:
        """Return the interval in ms, or -1 if periodic checkpoints are off."""
        return -1 if self._asked.interval is None else self._asked.interval

    def set_checkpoint_interval(self, checkpoint_interval: int | timedelta) -> Self:
        """Set the time between periodic checkpoints, from 10 ms."""
        return self._with(interval=checkpoint_interval)

    def get_checkpoint_timeout(self) -> int:
        """Return the age in ms at which an attempt is aborted."""
        return self._asked.timeout

    def set_checkpoint_timeout(self, checkpoint_timeout: int | timedelta) -> Self:
        """Set the age at which an attempt is aborted, from 10 ms."""
        return self._with(timeout=checkpoint_timeout)

    def get_min_pause_between_checkpoints(self) -> int:
        """Return the minimum time in ms from a completion to the next periodic attempt."""
        return self._asked.min_pause

    def set_min_pause_between_checkpoints(self, min_pause_between_checkpoints: int | timedelta) -> Self:
        """Set the minimum time from a completion to the next periodic attempt."""
        return self._with(min_pause=min_pause_between_checkpoints)

    def get_max_concurrent_checkpoints(self) -> int:
        return self._asked.max_concurrent

    def set_max_concurrent_checkpoints(self, max_concurrent_checkpoints: int) -> Self:
        """Set the maximum number of concurrent attempts, from 1."""
        return self._with(max_concurrent=max_concurrent_checkpoints)

    def is_fail_on_checkpointing_errors(self) -> bool:
        """Return whether the first failed checkpoint fails the stream."""
        return self._asked.tolerable_failures == 0

    def set_fail_on_checkpointing_errors(self, fail_on_checkpointing_errors: bool) -> Self:
        """Tolerate no failed checkpoint (True) or any number (False).

        As in Flink since 1.19, without effect once a tolerable number is set.
        """
        fails = _FAIL_ON_ERRORS.checked(fail_on_checkpointing_errors)
        if self._is_tolerance_set:
            return self
        return self.set_tolerable_checkpoint_failure_number(0 if fails else INT_MAX)

    def get_tolerable_checkpoint_failure_number(self) -> int:
        return self._asked.tolerable_failures

    def set_tolerable_checkpoint_failure_number(self, tolerable_checkpoint_failure_number: int) -> Self:
        """Set the tolerated number of consecutive failures."""
        self._with(tolerable_failures=tolerable_checkpoint_failure_number)
        self._is_tolerance_set = True
        return self

    def enable_externalized_checkpoints(
        self, cleanup_mode: ExternalizedCheckpointCleanup | ExternalizedCheckpointRetention
    ) -> Self:
        """Older name of `set_externalized_checkpoint_cleanup`."""
        return self.set_externalized_checkpoint_cleanup(cleanup_mode)

    def set_externalized_checkpoint_cleanup(
        self, cleanup_mode: ExternalizedCheckpointCleanup | ExternalizedCheckpointRetention
    ) -> Self:
        """Set which checkpoints outlive the stream, with either of Flink's enums."""
        if isinstance(cleanup_mode, ExternalizedCheckpointRetention):
            cleanup_mode = ExternalizedCheckpointCleanup[cleanup_mode.name]
        return self._with(cleanup=CLEANUP.member(cleanup_mode))

    def set_externalized_checkpoint_retention(self, retention: ExternalizedCheckpointRetention) -> Self:
        """Set the clean-up with the enum of Flink 1.20."""
        return self._with(cleanup=ExternalizedCheckpointCleanup[_RETENTION.member(retention).name])

    def is_externalized_checkpoints_enabled(self) -> bool:
        """Return whether any checkpoint can outlive the stream."""
        return self._asked.cleanup is not ExternalizedCheckpointCleanup.NO_EXTERNALIZED_CHECKPOINTS

    def get_externalized_checkpoint_cleanup(self) -> ExternalizedCheckpointCleanup:
        return self._asked.cleanup

    def get_externalized_checkpoint_retention(self) -> ExternalizedCheckpointRetention:
        """Return the clean-up option as the enum of Flink 1.20."""
        return ExternalizedCheckpointRetention[self._asked.cleanup.name]

    def is_unaligned_checkpoints_enabled(self) -> bool:
        """Return whether unaligned checkpoints are on, without effect under AT_LEAST_ONCE."""
        return self._asked.unaligned

    def enable_unaligned_checkpoints(self, enabled: bool = True) -> Self:
        """Take snapshots without waiting for the running batch."""
        return self._with(unaligned=enabled)

    def disable_unaligned_checkpoints(self) -> Self:
        """Take snapshots only between batches."""
        return self._with(unaligned=False)

    def get_alignment_timeout(self) -> Duration:
        """Return how long an attempt waits for the batch boundary."""
        return Duration.of_millis(self._asked.alignment_timeout)

    def set_alignment_timeout(self, alignment_timeout: timedelta) -> Self:
        """Set how long an attempt waits for the batch boundary; a number is refused, as in PyFlink."""
        if not isinstance(alignment_timeout, timedelta):
            allowed = "a Duration or a timedelta, for example Duration.of_seconds(30)"
            raise type_error("alignment timeout", alignment_timeout, allowed)
        return self._with(alignment_timeout=alignment_timeout)

    def is_force_unaligned_checkpoints(self) -> bool:
        return self._asked.force_unaligned

    def set_force_unaligned_checkpoints(self, force_unaligned_checkpoints: bool = True) -> Self:
        """Take unaligned snapshots even if the sink is not idempotent."""
        return self._with(force_unaligned=force_unaligned_checkpoints)

    def get_num_retained_checkpoints(self) -> int:
        return self._asked.num_retained

    def set_num_retained_checkpoints(self, num_retained: int) -> Self:
        """Set how many completed checkpoints are retained, from 1."""
        return self._with(num_retained=num_retained)

    def get_retention_policy(self) -> RetentionPolicy:
        return self._asked.retention_policy

    def set_retention_policy(self, retention: RetentionPolicy) -> Self:
        """Set which completed checkpoints are kept, instead of a number."""
        return self._with(retention=retention)

    def get_trigger_policy(self) -> TriggerPolicy | None:
        """Return when the next periodic checkpoint is due; None: never."""
        return self._asked.trigger_policy

    def set_trigger_policy(self, trigger: TriggerPolicy) -> Self:
        """Set when the next periodic checkpoint is due, instead of an interval."""
        return self._with(trigger=trigger)

    def is_prefer_checkpoint_for_recovery(self) -> bool:
        return self._asked.prefer_checkpoint_for_recovery

    def set_prefer_checkpoint_for_recovery(self, prefer_checkpoint_for_recovery: bool) -> Self:
        """Let recovery use the newest checkpoint despite a newer savepoint, or not."""
        return self._with(prefer_checkpoint_for_recovery=prefer_checkpoint_for_recovery)

    def get_checkpoint_storage(self) -> CheckpointStorage | None:
        """Return where snapshots are stored, or None if the deployment decides."""
        return self._asked.storage

    def set_checkpoint_storage(self, storage: CheckpointStorage | str) -> Self:
        """Set a storage, or the absolute path or URL of its directory."""
        return self._with(storage=storage)

    def set_checkpoint_storage_dir(self, checkpoint_path: str) -> Self:
        """Set the storage by its URL, as `set_checkpoint_storage` does."""
        return self._with(storage=FileSystemCheckpointStorage(checkpoint_path))

    def _with(self, **changes: Any) -> Self:
        # None would leave the option out; setters take no None.
        rules = {name: option.rule for name, option in options_of(CheckpointOptions).items()}
        self._asked = replace(self._asked, **{name: rules[name].checked(value) for name, value in changes.items()})
        return self
