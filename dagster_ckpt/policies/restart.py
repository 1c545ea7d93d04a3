"""Restart: whether and when a failed query starts again.

Flink's strategies have the defaults and limits of Flink 1.20
(https://nightlies.apache.org/flink/flink-docs-release-1.20/docs/ops/state/task_failure_recovery/). One policy decides
on restarts within a run and in a new run, from one durable history.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from random import Random
from typing import Protocol, runtime_checkable

from dagster_ckpt.errors import OptionError
from dagster_ckpt.policies import Combinable, Combination
from dagster_ckpt.values.durations import iso_duration, rounded_duration
from dagster_ckpt.values.validation import (
    INT_MAX,
    LONG_MAX,
    TIMEDELTA_MAX_MS,
    Milliseconds,
    WholeNumber,
    policy_name,
    type_error,
)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class FailureHistory:
    """Failures since a user last started the stream: at least one time in ms since the epoch, sorted."""

    failed_at_ms: tuple[int, ...]

    def __post_init__(self) -> None:
        """Sort the times, which machines with different clocks may have recorded."""
        if not self.failed_at_ms:
            raise OptionError(
                "failed_at_ms is empty, but must hold one failure or more: a restart strategy decides only after a "
                "failure."
            )
        object.__setattr__(self, "failed_at_ms", tuple(sorted(self.failed_at_ms)))

    @property
    def count(self) -> int:
        return len(self.failed_at_ms)

    @property
    def last_ms(self) -> int:
        return self.failed_at_ms[-1]

    def restart_after(self, delay_ms: int, now_ms: int, reason: str) -> RestartAt:
        return RestartAt(max(now_ms, self.last_ms + delay_ms), reason)


@dataclass(frozen=True)
class RestartAt:
    """Restart at a time since the epoch, never in the past."""

    at_ms: int
    reason: str


@dataclass(frozen=True)
class NoRestart:
    """The stream stays failed until a user starts it."""

    reason: str


@runtime_checkable
class RestartPolicy(Protocol):
    """Decides after a failure. Any object with this method is a policy.

    Example:
        >>> class ThreeTimes:
        ...     def decide(self, failures, now_ms, random):
        ...         if failures.count > 3:
        ...             return NoRestart("it failed three times")
        ...         return failures.restart_after(10_000, now_ms, "ten seconds after the failure")
        >>> policy = ThreeTimes()
    """

    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | NoRestart:
        """Decide what to do after the last failure.

        Args:
            now_ms: By the catalog's clock, as the failures.
            random: Seeded with the execution's id, so that each evaluation decides the same.
        """


def restart_description(policy: object) -> str:
    """Describe one of Flink's strategies in Flink's words, and another by its name."""
    describe = getattr(policy, "described", None) or getattr(policy, "get_description", None)
    return str(describe()) if callable(describe) else policy_name(policy)


def checked_restart(option: str, policy: object) -> RestartPolicy:
    if not isinstance(policy, RestartPolicy) or isinstance(policy, type):
        allowed = (
            "a value made by RestartStrategies, or an object of your own with a method decide(failures, now_ms, random)"
        )
        raise type_error(option, policy, allowed)
    return policy


class _Rule(Combinable[RestartPolicy]):
    """A policy of this package."""


class AnyOf(Combination[RestartPolicy], _Rule):
    """Restart as soon as one policy says so: `first | second`."""

    sign = "|"
    checked = partial(checked_restart, "restart_strategy")
    shown = restart_description

    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | NoRestart:
        decisions = [policy.decide(failures, now_ms, random) for policy in self.policies]
        restarts = [each for each in decisions if isinstance(each, RestartAt)]
        return min(restarts, key=lambda each: each.at_ms) if restarts else decisions[0]


class AllOf(Combination[RestartPolicy], _Rule):
    """Restart once every policy says so: `first & second`."""

    sign = "&"
    checked = partial(checked_restart, "restart_strategy")
    shown = restart_description

    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | NoRestart:
        restarts: list[RestartAt] = []
        for policy in self.policies:
            decision = policy.decide(failures, now_ms, random)
            if not isinstance(decision, RestartAt):
                return decision
            restarts.append(decision)
        return max(restarts, key=lambda each: each.at_ms)


_Rule.any_of, _Rule.all_of = AnyOf, AllOf


class RestartStrategyConfiguration(ABC):
    """Flink's base class of strategies."""

    @abstractmethod
    def get_description(self) -> str:
        """Return the description in Flink's words."""

    def described(self) -> str:
        """Return Flink's description with readable durations."""
        return self.get_description()


class DecidingRestartStrategy(_Rule, RestartStrategyConfiguration):
    @abstractmethod
    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | NoRestart:
        """Decide as a `RestartPolicy`."""

    def validate(self) -> None:
        """Check what PyFlink rejects only when the stream starts."""


ATTEMPTS = WholeNumber("restart_attempts", minimum=0)
DELAY = Milliseconds("delay_between_attempts", minimum=0, maximum=TIMEDELTA_MAX_MS)
DELAY_INTERVAL = Milliseconds("delay_interval", minimum=0, maximum=TIMEDELTA_MAX_MS)
FAILURE_RATE = WholeNumber("failure_rate", minimum=1, unit="of failures")
FAILURE_INTERVAL = Milliseconds("failure_interval", minimum=1, maximum=TIMEDELTA_MAX_MS)


class _DelayedRestart(DecidingRestartStrategy):
    def get_description(self) -> str:
        return self._described(iso_duration, "f")

    def described(self) -> str:
        return self._described(rounded_duration, "g")

    @abstractmethod
    def _described(self, duration: Callable[[int], str], number: str) -> str: ...


@dataclass(frozen=True)
class NoRestartStrategyConfiguration(DecidingRestartStrategy):
    """The first failure ends the stream."""

    def get_description(self) -> str:
        return "Restart deactivated."

    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | NoRestart:
        del failures, now_ms, random
        return NoRestart("No restart strategy is set, so the first failure ends the stream.")


@dataclass(frozen=True, init=False)
class FixedDelayRestartStrategyConfiguration(_DelayedRestart):
    """A limited number of restarts, each after the same delay.

    Negative values are refused when the stream starts, as in PyFlink.

    Args:
        restart_attempts: One more failure ends the stream.
        delay_between_attempts_interval: From a failure to its restart, ms or timedelta.
    """

    restart_attempts: int
    delay_ms: int

    def __init__(
        self, restart_attempts: int | None = None, delay_between_attempts_interval: int | timedelta | None = None
    ) -> None:
        object.__setattr__(self, "restart_attempts", _as_pyflink(ATTEMPTS, restart_attempts))
        object.__setattr__(self, "delay_ms", _as_pyflink(DELAY, delay_between_attempts_interval))

    def _described(self, duration: Callable[[int], str], number: str) -> str:
        del number
        return f"Restart with fixed delay ({duration(self.delay_ms)}). #{self.restart_attempts} restart attempts."

    def get_restart_attempts(self) -> int:
        return self.restart_attempts

    def get_delay_between_attempts_interval(self) -> timedelta:
        return timedelta(milliseconds=self.delay_ms)

    def validate(self) -> None:
        ATTEMPTS.checked(self.restart_attempts)
        DELAY.checked(self.delay_ms)

    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | NoRestart:
        del random
        self.validate()
        if failures.count > self.restart_attempts:
            return NoRestart(f"All {self.restart_attempts} restart attempts are used up.")
        reason = f"Restart attempt {failures.count} of {self.restart_attempts}."
        return failures.restart_after(self.delay_ms, now_ms, reason)


@dataclass(frozen=True, init=False)
class FailureRateRestartStrategyConfiguration(_DelayedRestart):
    """Restarts until the failure rate exceeds a limit.

    Values out of range are refused when the stream starts, as in PyFlink.

    Args:
        max_failure_rate: Failures per interval; one more ends the stream.
        failure_interval: Before the last failure, ms or timedelta.
        delay_between_attempts_interval: From a failure to its restart, ms or timedelta.
    """

    failure_rate: int
    failure_interval_ms: int
    delay_ms: int

    def __init__(
        self,
        max_failure_rate: int | None = None,
        failure_interval: int | timedelta | None = None,
        delay_between_attempts_interval: int | timedelta | None = None,
    ) -> None:
        object.__setattr__(self, "failure_rate", _as_pyflink(FAILURE_RATE, max_failure_rate))
        object.__setattr__(self, "failure_interval_ms", _as_pyflink(FAILURE_INTERVAL, failure_interval))
        object.__setattr__(self, "delay_ms", _as_pyflink(DELAY_INTERVAL, delay_between_attempts_interval))

    def _described(self, duration: Callable[[int], str], number: str) -> str:
        del number
        return (
            f"Failure rate restart with maximum of {self.failure_rate} failures "
            f"within interval {duration(self.failure_interval_ms)} and fixed delay {duration(self.delay_ms)}."
        )

    def get_max_failure_rate(self) -> int:
        return self.failure_rate

    def get_failure_interval(self) -> timedelta:
        return timedelta(milliseconds=self.failure_interval_ms)

    def get_delay_between_attempts_interval(self) -> timedelta:
        return timedelta(milliseconds=self.delay_ms)

    def validate(self) -> None:
        FAILURE_RATE.checked(self.failure_rate)
        FAILURE_INTERVAL.checked(self.failure_interval_ms)
        DELAY_INTERVAL.checked(self.delay_ms)

    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | NoRestart:
        """As in Flink, a failure exactly one interval ago still counts."""
        del random
        self.validate()
        window_start_ms = failures.last_ms - self.failure_interval_ms
        recent = sum(at_ms >= window_start_ms for at_ms in failures.failed_at_ms)
        within = f"within {rounded_duration(self.failure_interval_ms)}, {self.failure_rate} allowed."
        if recent > self.failure_rate:
            return NoRestart(f"{recent} failures {within}")
        return failures.restart_after(self.delay_ms, now_ms, f"{recent} failures {within}")


@dataclass(frozen=True)
class FallbackRestartStrategyConfiguration(RestartStrategyConfiguration):
    """The deployment decides; see `effective_restart_strategy`."""

    def get_description(self) -> str:
        return "Cluster level default restart strategy"


def _as_pyflink(allowed: WholeNumber, value: object) -> int:
    """Leave too low a value to `validate`, as PyFlink does."""
    number = allowed.typed(value)
    return number if -allowed.maximum <= number < allowed.minimum else allowed.checked(number)


INITIAL_BACKOFF = Milliseconds("initial_backoff", minimum=1, maximum=TIMEDELTA_MAX_MS)
MAX_BACKOFF = Milliseconds("max_backoff", minimum=1, maximum=TIMEDELTA_MAX_MS)
RESET_THRESHOLD = Milliseconds("reset_backoff_threshold", minimum=1, maximum=TIMEDELTA_MAX_MS)
_ATTEMPTS_BEFORE_RESET = WholeNumber("attempts_before_reset_backoff", minimum=1)


@dataclass(frozen=True)
class ExponentialDelayRestartStrategyConfiguration(_DelayedRestart):
    """Restarts with exponential back-off, reset once the stream is healthy for long enough.

    Flink's default while checkpointing is on (since 1.19, FLIP-364).

    Attributes:
        max_backoff_ms: Longest delay, jitter included.
        backoff_multiplier: Growth from one delay to the next, above 1.
        reset_backoff_threshold_ms: Healthy time after which delays and attempts are reset.
        jitter_factor: Largest random part of a delay, 0 to 1.
        attempts_before_reset_backoff: Restarts without such a time; one more failure ends the stream.
    """

    initial_backoff_ms: int = 1_000
    max_backoff_ms: int = 60_000
    backoff_multiplier: float = 1.5
    reset_backoff_threshold_ms: int = 3_600_000
    jitter_factor: float = 0.1
    attempts_before_reset_backoff: int = INT_MAX

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Apply the limits of Flink's `ExponentialDelayRestartBackoffTimeStrategy`."""
        INITIAL_BACKOFF.checked(self.initial_backoff_ms)
        MAX_BACKOFF.checked(self.max_backoff_ms)
        RESET_THRESHOLD.checked(self.reset_backoff_threshold_ms)
        _ATTEMPTS_BEFORE_RESET.checked(self.attempts_before_reset_backoff)
        _check_number("backoff_multiplier", self.backoff_multiplier, "a number above 1")
        _check_number("jitter_factor", self.jitter_factor, "a number from 0 to 1")
        if self.initial_backoff_ms > self.max_backoff_ms:
            raise OptionError(
                f"initial_backoff is {self.initial_backoff_ms} ms, "
                f"but must be at most max_backoff, which is {self.max_backoff_ms} ms."
            )
        if not 1 < self.backoff_multiplier < float("inf"):
            raise OptionError(f"backoff_multiplier is {self.backoff_multiplier}, but must be a number above 1.")
        if not 0 <= self.jitter_factor <= 1:
            raise OptionError(f"jitter_factor is {self.jitter_factor}, but must be a number from 0 to 1.")

    def _described(self, duration: Callable[[int], str], number: str) -> str:
        return (
            f"Restart with exponential delay: starting at {duration(self.initial_backoff_ms)}, "
            f"increasing by {self.backoff_multiplier:{number}}, with maximum {duration(self.max_backoff_ms)}. "
            f"Delay resets after {duration(self.reset_backoff_threshold_ms)} "
            f"with jitter {self.jitter_factor:{number}}"
        )

    def get_initial_backoff(self) -> timedelta:
        return timedelta(milliseconds=self.initial_backoff_ms)

    def get_max_backoff(self) -> timedelta:
        return timedelta(milliseconds=self.max_backoff_ms)

    def get_backoff_multiplier(self) -> float:
        return self.backoff_multiplier

    def get_reset_backoff_threshold(self) -> timedelta:
        return timedelta(milliseconds=self.reset_backoff_threshold_ms)

    def get_jitter_factor(self) -> float:
        return self.jitter_factor

    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | NoRestart:
        attempt = self._attempts_since_reset(failures)
        if attempt > self.attempts_before_reset_backoff:
            return NoRestart(
                f"All {self.attempts_before_reset_backoff} restart attempts are used up without "
                f"{rounded_duration(self.reset_backoff_threshold_ms)} of healthy running between them."
            )
        delay_ms = self._with_jitter(self._grown(attempt), random)
        reason = f"Restart attempt {attempt}, delayed by {rounded_duration(delay_ms)}."
        return failures.restart_after(delay_ms, now_ms, reason)

    def _attempts_since_reset(self, failures: FailureHistory) -> int:
        attempt = 1
        for before_ms, failed_ms in pairwise(failures.failed_at_ms):
            # As in Flink, an execution counts as healthy from its planned start.
            healthy_from_ms = before_ms + min(self._grown(attempt), self.max_backoff_ms)
            lasted = failed_ms - healthy_from_ms >= self.reset_backoff_threshold_ms
            attempt = 1 if lasted else attempt + 1
        return attempt

    def _grown(self, attempt: int) -> int:
        """The n-th delay before maximum and jitter, rounded down as in Flink."""
        try:
            return int(self.initial_backoff_ms * self.backoff_multiplier ** (attempt - 1))
        except OverflowError:
            return LONG_MAX

    def _with_jitter(self, delay_ms: int, random: Random) -> int:
        spread_ms = int(delay_ms * self.jitter_factor)
        jittered_ms = delay_ms + random.randint(-spread_ms, spread_ms)
        return max(self.initial_backoff_ms, min(jittered_ms, self.max_backoff_ms))


def _check_number(option: str, value: object, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise type_error(option, value, allowed)


class RestartStrategies:
    """Creates restart strategies under PyFlink's names. Durations are ms or timedeltas.

    Example:
        >>> RestartStrategies.fixed_delay_restart(3, 1000).get_description()
        'Restart with fixed delay (PT1S). #3 restart attempts.'
    """

    NoRestartStrategyConfiguration = NoRestartStrategyConfiguration
    FixedDelayRestartStrategyConfiguration = FixedDelayRestartStrategyConfiguration
    FailureRateRestartStrategyConfiguration = FailureRateRestartStrategyConfiguration
    FallbackRestartStrategyConfiguration = FallbackRestartStrategyConfiguration

    @staticmethod
    def no_restart() -> DecidingRestartStrategy:
        """Never restart."""
        return NoRestartStrategyConfiguration()

    @staticmethod
    def fall_back_restart() -> RestartStrategyConfiguration:
        """Let the deployment decide."""
        return FallbackRestartStrategyConfiguration()

    @staticmethod
    def fixed_delay_restart(restart_attempts: int, delay_between_attempts: int | timedelta) -> DecidingRestartStrategy:
        """Restart a limited number of times, each after the same delay."""
        return FixedDelayRestartStrategyConfiguration(restart_attempts, delay_between_attempts)

    @staticmethod
    def failure_rate_restart(
        failure_rate: int, failure_interval: int | timedelta, delay_interval: int | timedelta
    ) -> DecidingRestartStrategy:
        """Restart unless an interval contains more failures than the rate allows."""
        return FailureRateRestartStrategyConfiguration(failure_rate, failure_interval, delay_interval)

    @staticmethod
    def exponential_delay_restart(
        initial_backoff: int | timedelta = 1_000,
        max_backoff: int | timedelta = 60_000,
        backoff_multiplier: float = 1.5,
        reset_backoff_threshold: int | timedelta = 3_600_000,
        jitter_factor: float = 0.1,
        *,
        attempts_before_reset_backoff: int = INT_MAX,
    ) -> DecidingRestartStrategy:
        """Restart with exponential back-off; the defaults are those of Flink since 1.19."""
        return ExponentialDelayRestartStrategyConfiguration(
            INITIAL_BACKOFF.checked(initial_backoff),
            MAX_BACKOFF.checked(max_backoff),
            backoff_multiplier,
            RESET_THRESHOLD.checked(reset_backoff_threshold),
            jitter_factor,
            attempts_before_reset_backoff,
        )


def effective_restart_strategy(
    configured: RestartStrategyConfiguration | RestartPolicy | None,
    *,
    deployment: RestartStrategyConfiguration | RestartPolicy | None = None,
    checkpointing_enabled: bool,
) -> RestartPolicy:
    """The stream's strategy, else the deployment's, else Flink's default."""
    for option, strategy in (("restart_strategy", configured), ("deployment restart_strategy", deployment)):
        if strategy is None or isinstance(strategy, FallbackRestartStrategyConfiguration):
            continue
        if isinstance(strategy, DecidingRestartStrategy):
            strategy.validate()
        return checked_restart(option, strategy)
    return ExponentialDelayRestartStrategyConfiguration() if checkpointing_enabled else NoRestartStrategyConfiguration()


# Flink's default: no limit, growing delays.
FALLBACK_RESTART = ExponentialDelayRestartStrategyConfiguration()


def decide_restart(
    policy: RestartPolicy, failures: FailureHistory, now_ms: int, random: Random
) -> RestartAt | NoRestart:
    """Ask a policy, or `FALLBACK_RESTART` if it raises or gives no decision.

    Failures later than `now_ms`, which were dated before the clock was put back, are moved so that the last one is now.
    """
    past = [at_ms for at_ms in failures.failed_at_ms if at_ms <= now_ms]
    ahead_ms = failures.last_ms - now_ms
    if ahead_ms <= 0:
        return _decision(policy, failures, now_ms, random)
    moved = (at_ms - ahead_ms for at_ms in failures.failed_at_ms if at_ms > now_ms)
    decision = _decision(policy, FailureHistory((*past, *moved)), now_ms, random)
    if not isinstance(decision, RestartAt):
        return decision
    # From a failure that is now at each call, the delay would never end.
    delay_ms = decision.at_ms - now_ms
    return RestartAt(max(now_ms, max(past, default=0) + delay_ms), decision.reason)


def _decision(policy: RestartPolicy, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | NoRestart:
    try:
        answer: object = policy.decide(failures, now_ms, random)
        problem = f"it returned {answer!r}, which is neither RestartAt nor NoRestart"
    except Exception as error:  # noqa: BLE001 - a user's code may raise anything
        answer, problem = None, f"{type(error).__name__}: {error}"
    if isinstance(answer, RestartAt | NoRestart):
        return answer
    _LOG.warning("Restart policy %s failed, so %s applies: %s", policy_name(policy), FALLBACK_RESTART, problem)
    return FALLBACK_RESTART.decide(failures, now_ms, random)
