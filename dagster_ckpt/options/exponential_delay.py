"""The restart strategy with growing delays, Flink's default while checkpointing is on."""

from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from random import Random

from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.options.allowed_values import INT_MAX, LONG_MAX, TIMEDELTA_MAX_MS, Milliseconds, WholeNumber
from dagster_ckpt.options.durations import iso_duration
from dagster_ckpt.options.restart_decision import DecidingRestartStrategy, FailureHistory, GiveUp, RestartAt

INITIAL_BACKOFF = Milliseconds("initial_backoff", minimum=1, maximum=TIMEDELTA_MAX_MS)
MAX_BACKOFF = Milliseconds("max_backoff", minimum=1, maximum=TIMEDELTA_MAX_MS)
RESET_THRESHOLD = Milliseconds("reset_backoff_threshold", minimum=1, maximum=TIMEDELTA_MAX_MS)
_ATTEMPTS_BEFORE_RESET = WholeNumber("attempts_before_reset_backoff", minimum=1)


@dataclass(frozen=True)
class ExponentialDelayRestartStrategyConfiguration(DecidingRestartStrategy):
    """Restarts after growing delays, which start anew once the job has been healthy for long.

    Flink's default while checkpointing is on (since 1.19, FLIP-364).

    Attributes:
        initial_backoff_ms: First delay, and the shortest.
        max_backoff_ms: Longest delay, jitter included.
        backoff_multiplier: Growth from one delay to the next, above 1.
        reset_backoff_threshold_ms: Healthy time after which delays and attempts start anew.
        jitter_factor: Largest random part of a delay, 0 to 1, so that many jobs do not restart at once.
        attempts_before_reset_backoff: Restarts without such a healthy time; one more failure ends the job.

    Raises:
        OptionError: A value is out of range.
        OptionTypeError: A value has the wrong type.
    """

    initial_backoff_ms: int = 1_000
    max_backoff_ms: int = 60_000
    backoff_multiplier: float = 1.5
    reset_backoff_threshold_ms: int = 3_600_000
    jitter_factor: float = 0.1
    attempts_before_reset_backoff: int = INT_MAX

    def __post_init__(self) -> None:
        """Check the values."""
        self.validate()

    def validate(self) -> None:
        """Check the values, with the limits of Flink's `ExponentialDelayRestartBackoffTimeStrategy`."""
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

    def get_description(self) -> str:
        """Return Flink's sentence."""
        return (
            f"Restart with exponential delay: starting at {iso_duration(self.initial_backoff_ms)}, "
            f"increasing by {self.backoff_multiplier:f}, with maximum {iso_duration(self.max_backoff_ms)}. "
            f"Delay resets after {iso_duration(self.reset_backoff_threshold_ms)} "
            f"with jitter {self.jitter_factor:f}"
        )

    def get_initial_backoff(self) -> timedelta:
        """Return the first delay."""
        return timedelta(milliseconds=self.initial_backoff_ms)

    def get_max_backoff(self) -> timedelta:
        """Return the longest delay."""
        return timedelta(milliseconds=self.max_backoff_ms)

    def get_backoff_multiplier(self) -> float:
        """Return the growth from one delay to the next."""
        return self.backoff_multiplier

    def get_reset_backoff_threshold(self) -> timedelta:
        """Return the healthy time after which delays start anew."""
        return timedelta(milliseconds=self.reset_backoff_threshold_ms)

    def get_jitter_factor(self) -> float:
        """Return the largest random part of a delay."""
        return self.jitter_factor

    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | GiveUp:
        """Restart after the next delay, unless the attempts are used up."""
        attempt = self._attempts_since_reset(failures)
        if attempt > self.attempts_before_reset_backoff:
            return GiveUp(
                f"All {self.attempts_before_reset_backoff} restart attempts are used up without "
                f"{iso_duration(self.reset_backoff_threshold_ms)} of healthy running between them."
            )
        delay_ms = self._with_jitter(self._grown(attempt), random)
        reason = f"Restart attempt {attempt}, delayed by {iso_duration(delay_ms)}."
        return failures.restart_after(delay_ms, now_ms, reason)

    def _attempts_since_reset(self, failures: FailureHistory) -> int:
        attempt = 1
        times = failures.failed_at_ms
        for index, (before_ms, failed_ms) in enumerate(pairwise(times), start=2):
            healthy_from_ms = before_ms + min(self._grown(attempt), self.max_backoff_ms)
            if index == failures.count and failures.healthy_since_ms is not None:
                healthy_from_ms = failures.healthy_since_ms
            lasted = failed_ms - healthy_from_ms >= self.reset_backoff_threshold_ms
            attempt = 1 if lasted else attempt + 1
        return attempt

    def _grown(self, attempt: int) -> int:
        """Return the n-th delay before the maximum and the jitter, rounded down as in Flink."""
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
        raise OptionTypeError(f"{option} is {value!r} ({type(value).__name__}), but must be {allowed}.")
