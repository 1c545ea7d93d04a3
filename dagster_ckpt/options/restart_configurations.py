"""The restart strategies with a fixed delay or none, and the fallback to the deployment.

Sentences, defaults and limits are those of Flink 1.20
(https://nightlies.apache.org/flink/flink-docs-release-1.20/docs/ops/state/task_failure_recovery/).
"""

from dataclasses import dataclass
from datetime import timedelta
from random import Random

from dagster_ckpt.options.allowed_values import TIMEDELTA_MAX_MS, Milliseconds, WholeNumber
from dagster_ckpt.options.durations import iso_duration
from dagster_ckpt.options.restart_decision import (
    DecidingRestartStrategy,
    FailureHistory,
    GiveUp,
    RestartAt,
    RestartStrategyConfiguration,
)

ATTEMPTS = WholeNumber("restart_attempts", minimum=0)
DELAY = Milliseconds("delay_between_attempts", minimum=0, maximum=TIMEDELTA_MAX_MS)
DELAY_INTERVAL = Milliseconds("delay_interval", minimum=0, maximum=TIMEDELTA_MAX_MS)
FAILURE_RATE = WholeNumber("failure_rate", minimum=1, unit="of failures")
FAILURE_INTERVAL = Milliseconds("failure_interval", minimum=1, maximum=TIMEDELTA_MAX_MS)


@dataclass(frozen=True)
class NoRestartStrategyConfiguration(DecidingRestartStrategy):
    """The first failure ends the job."""

    def get_description(self) -> str:
        """Return Flink's sentence."""
        return "Restart deactivated."

    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | GiveUp:
        """Give up."""
        del failures, now_ms, random  # nothing could change the answer
        return GiveUp("No restart strategy is set, so the first failure ends the job.")


@dataclass(frozen=True, init=False)
class FixedDelayRestartStrategyConfiguration(DecidingRestartStrategy):
    """So many restarts, each the same time after its failure.

    Args:
        restart_attempts: How many restarts; the failure after the last one ends the job.
        delay_between_attempts_interval: Time between a failure and its restart, ms or timedelta.

    Raises:
        OptionTypeError: A value has the wrong type. A negative one is refused by `validate`, as PyFlink refuses it
            when the job starts.
    """

    restart_attempts: int
    delay_ms: int

    def __init__(
        self, restart_attempts: int | None = None, delay_between_attempts_interval: int | timedelta | None = None
    ) -> None:
        object.__setattr__(self, "restart_attempts", _as_pyflink(ATTEMPTS, restart_attempts))
        object.__setattr__(self, "delay_ms", _as_pyflink(DELAY, delay_between_attempts_interval))

    def get_description(self) -> str:
        """Return Flink's sentence."""
        delay = iso_duration(self.delay_ms)
        return f"Restart with fixed delay ({delay}). #{self.restart_attempts} restart attempts."

    def get_restart_attempts(self) -> int:
        """Return how many restarts there are."""
        return self.restart_attempts

    def get_delay_between_attempts_interval(self) -> timedelta:
        """Return the time between a failure and its restart."""
        return timedelta(milliseconds=self.delay_ms)

    def validate(self) -> None:
        """Check both values."""
        ATTEMPTS.checked(self.restart_attempts)
        DELAY.checked(self.delay_ms)

    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | GiveUp:
        """Restart until the attempts are used up."""
        del random  # a fixed delay has no jitter
        self.validate()
        if failures.count > self.restart_attempts:
            return GiveUp(f"All {self.restart_attempts} restart attempts are used up.")
        reason = f"Restart attempt {failures.count} of {self.restart_attempts}."
        return failures.restart_after(self.delay_ms, now_ms, reason)


@dataclass(frozen=True, init=False)
class FailureRateRestartStrategyConfiguration(DecidingRestartStrategy):
    """Restarts for as long as failures do not come too often.

    Args:
        max_failure_rate: How many failures an interval may hold; one more ends the job.
        failure_interval: Length of the interval that ends with the last failure, ms or timedelta.
        delay_between_attempts_interval: Time between a failure and its restart, ms or timedelta.

    Raises:
        OptionTypeError: A value has the wrong type. One out of range is refused by `validate`, as PyFlink refuses it
            when the job starts.
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

    def get_description(self) -> str:
        """Return Flink's sentence."""
        interval, delay = iso_duration(self.failure_interval_ms), iso_duration(self.delay_ms)
        return (
            f"Failure rate restart with maximum of {self.failure_rate} failures "
            f"within interval {interval} and fixed delay {delay}."
        )

    def get_max_failure_rate(self) -> int:
        """Return how many failures an interval may hold."""
        return self.failure_rate

    def get_failure_interval(self) -> timedelta:
        """Return the length of the interval."""
        return timedelta(milliseconds=self.failure_interval_ms)

    def get_delay_between_attempts_interval(self) -> timedelta:
        """Return the time between a failure and its restart."""
        return timedelta(milliseconds=self.delay_ms)

    def validate(self) -> None:
        """Check the three values."""
        FAILURE_RATE.checked(self.failure_rate)
        FAILURE_INTERVAL.checked(self.failure_interval_ms)
        DELAY_INTERVAL.checked(self.delay_ms)

    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | GiveUp:
        """Restart unless the interval before the last failure holds too many.

        Flink compares with "more than": a failure exactly one interval ago still counts.
        """
        del random  # a fixed delay has no jitter
        self.validate()
        window_start_ms = failures.last_ms - self.failure_interval_ms
        recent = sum(at_ms >= window_start_ms for at_ms in failures.failed_at_ms)
        within = f"within {iso_duration(self.failure_interval_ms)}, {self.failure_rate} allowed."
        if recent > self.failure_rate:
            return GiveUp(f"{recent} failures {within}")
        return failures.restart_after(self.delay_ms, now_ms, f"{recent} failures {within}")


@dataclass(frozen=True)
class FallbackRestartStrategyConfiguration(RestartStrategyConfiguration):
    """The job leaves it to the deployment; `effective_restart_strategy` finds what that means."""

    def get_description(self) -> str:
        """Return Flink's sentence."""
        return "Cluster level default restart strategy"


def _as_pyflink(allowed: WholeNumber, value: object) -> int:
    """Let a value below the range pass: PyFlink makes such an object, and the job's start refuses it."""
    number = allowed.typed(value)
    return number if -allowed.maximum <= number < allowed.minimum else allowed.checked(number)
