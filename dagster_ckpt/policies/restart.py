"""Restart: whether and when a failed query starts again.

A policy is a pure function of the failures. Flink's strategies (`restart_strategies.py`) are policies;
a policy of your own is used in the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol, runtime_checkable

from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.values.validation import policy_name


@dataclass(frozen=True)
class FailureHistory:
    """The failures of a stream since a user last started it, including the one to decide on.

    Attributes:
        failed_at_ms: When each failure happened, in ms since the epoch. Sorted by time.
        healthy_since_ms: When the execution that failed last became healthy. If None, it is assumed
            to have been healthy since its planned start.

    Raises:
        OptionError: The history contains no failure, so there is nothing to decide.
    """

    failed_at_ms: tuple[int, ...]
    healthy_since_ms: int | None = None

    def __post_init__(self) -> None:
        """Sort the failures, which may have been recorded by machines with different clocks."""
        if not self.failed_at_ms:
            raise OptionError(
                "failed_at_ms is empty, but must hold one failure or more: a restart strategy decides only after a "
                "failure."
            )
        object.__setattr__(self, "failed_at_ms", tuple(sorted(self.failed_at_ms)))

    @property
    def count(self) -> int:
        """Number of failures."""
        return len(self.failed_at_ms)

    @property
    def last_ms(self) -> int:
        """Time of the last failure."""
        return self.failed_at_ms[-1]

    def restart_after(self, delay_ms: int, now_ms: int, reason: str) -> RestartAt:
        """Return a restart this long after the last failure, or now if that time has passed."""
        return RestartAt(max(now_ms, self.last_ms + delay_ms), reason)


@dataclass(frozen=True)
class RestartAt:
    """Decision to restart the stream.

    Attributes:
        at_ms: When, in ms since the epoch; never in the past.
        reason: Why, for logs and pages.
    """

    at_ms: int
    reason: str


@dataclass(frozen=True)
class NoRestart:
    """Decision not to restart: the stream stays failed until a user starts it.

    Attributes:
        reason: Why, for logs and pages.
    """

    reason: str


@runtime_checkable
class RestartPolicy(Protocol):
    """Decides what to do after a failure. Any object with this method is a policy.

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
            failures: The failures since a user last started the stream.
            now_ms: The time by the catalog's clock, which also dated the failures.
            random: Source of jitter. It is seeded with the execution's id, so that each evaluation of
                one failure returns the same decision.
        """


class Combinable:
    """Adds `|` and `&` to a policy; the other side may be a policy of your own."""

    def __or__(self: RestartPolicy, other: RestartPolicy) -> AnyOf:
        return AnyOf(self, other)

    def __ror__(self: RestartPolicy, other: RestartPolicy) -> AnyOf:
        return AnyOf(other, self)

    def __and__(self: RestartPolicy, other: RestartPolicy) -> AllOf:
        return AllOf(self, other)

    def __rand__(self: RestartPolicy, other: RestartPolicy) -> AllOf:
        return AllOf(other, self)


@dataclass(frozen=True, init=False)
class AnyOf(Combinable):
    """Restart as soon as one policy says so: `first | second`."""

    policies: tuple[RestartPolicy, ...]

    def __init__(self, *policies: RestartPolicy) -> None:
        object.__setattr__(self, "policies", _checked_members(policies))

    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | NoRestart:
        """The earliest restart; none if no policy restarts."""
        decisions = [policy.decide(failures, now_ms, random) for policy in self.policies]
        restarts = [each for each in decisions if isinstance(each, RestartAt)]
        return min(restarts, key=lambda each: each.at_ms) if restarts else decisions[0]

    def __repr__(self) -> str:
        return " | ".join(map(restart_description, self.policies)).join("()")


@dataclass(frozen=True, init=False)
class AllOf(Combinable):
    """Restart once every policy says so: `first & second`."""

    policies: tuple[RestartPolicy, ...]

    def __init__(self, *policies: RestartPolicy) -> None:
        object.__setattr__(self, "policies", _checked_members(policies))

    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | NoRestart:
        """The latest restart; none if one policy does not restart."""
        restarts: list[RestartAt] = []
        for policy in self.policies:
            decision = policy.decide(failures, now_ms, random)
            if not isinstance(decision, RestartAt):
                return decision
            restarts.append(decision)
        return max(restarts, key=lambda each: each.at_ms)

    def __repr__(self) -> str:
        return " & ".join(map(restart_description, self.policies)).join("()")


def restart_description(policy: object) -> str:
    """Describe a policy to a person: in Flink's words if it is one of Flink's, otherwise by its name."""
    describe = getattr(policy, "described", None) or getattr(policy, "get_description", None)
    return str(describe()) if callable(describe) else policy_name(policy)


def checked_restart(option: str, policy: object) -> RestartPolicy:
    """Return a value if it is a restart policy.

    Args:
        option: Name of the option, for the message.
        policy: The value.

    Raises:
        OptionTypeError: It has no method `decide`.
    """
    if not isinstance(policy, RestartPolicy) or isinstance(policy, type):
        raise OptionTypeError(
            f"{option} is {policy!r} ({type(policy).__name__}), but must be a value made by RestartStrategies, or an "
            "object of your own with a method decide(failures, now_ms, random)."
        )
    return policy


def _checked_members(policies: Sequence[object]) -> tuple[RestartPolicy, ...]:
    if not policies:
        raise OptionError("policies is (), but must hold one policy or more.")
    return tuple(checked_restart("restart_strategy", policy) for policy in policies)
