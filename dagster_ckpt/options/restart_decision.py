"""What a restart strategy is asked, and what it answers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random

from dagster_ckpt.errors import OptionError


@dataclass(frozen=True)
class FailureHistory:
    """The failures of a job since a person last started it, the one to decide on included.

    Attributes:
        failed_at_ms: When each failed, in ms since the epoch. Kept in order of time.
        healthy_since_ms: When the execution that failed last had become healthy; None where that is
            not known: it is then taken to have been healthy from its planned start.

    Raises:
        OptionError: It holds no failure, so there is nothing to decide.
    """

    failed_at_ms: tuple[int, ...]
    healthy_since_ms: int | None = None

    def __post_init__(self) -> None:
        """Put the failures in order; clocks of different machines may have written them."""
        if not self.failed_at_ms:
            raise OptionError(
                "failed_at_ms is empty, but must hold one failure or more: "
                "a restart strategy is asked only after the job has failed."
            )
        object.__setattr__(self, "failed_at_ms", tuple(sorted(self.failed_at_ms)))

    @property
    def count(self) -> int:
        """How many failures there are."""
        return len(self.failed_at_ms)

    @property
    def last_ms(self) -> int:
        """When the job failed last."""
        return self.failed_at_ms[-1]

    def restart_after(self, delay_ms: int, now_ms: int, reason: str) -> "RestartAt":
        """Return a restart so long after the last failure, or now where that has passed."""
        return RestartAt(max(now_ms, self.last_ms + delay_ms), reason)


@dataclass(frozen=True)
class RestartAt:
    """The job is restarted.

    Attributes:
        at_ms: When, in ms since the epoch; never in the past.
        reason: Why, as a sentence.
    """

    at_ms: int
    reason: str


@dataclass(frozen=True)
class GiveUp:
    """The job stays failed until a person starts it.

    Attributes:
        reason: Why, as a sentence.
    """

    reason: str


class RestartStrategyConfiguration(ABC):
    """What a job was told to do after a failure."""

    @abstractmethod
    def get_description(self) -> str:
        """Return the strategy in a sentence, as Flink words it."""


class DecidingRestartStrategy(RestartStrategyConfiguration):
    """A strategy that can decide by itself: every one but the fallback."""

    @abstractmethod
    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | GiveUp:
        """Decide what follows the last failure.

        Args:
            failures: What has happened since a person last started the job.
            now_ms: The time, in ms since the epoch.
            random: Source of jitter. Seed it with the execution's id to get one answer however often
                the question is asked.

        Raises:
            OptionError: The strategy itself is impossible, see `validate`.
        """

    def validate(self) -> None:
        """Check the values that PyFlink accepts when the object is made and refuses when the job starts.

        Raises:
            OptionError: One is out of range.
        """
