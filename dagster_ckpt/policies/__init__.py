"""Rules as pure functions, without I/O or clock: when to restart, what to retain, how to upgrade."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from dagster_ckpt.errors import OptionError
from dagster_ckpt.values.validation import policy_name

Policy = TypeVar("Policy")


class Combinable(Generic[Policy]):
    """Adds `|` and `&`; the other side may be a policy of your own."""

    any_of: ClassVar[Callable[..., object]]
    all_of: ClassVar[Callable[..., object]]

    def __or__(self, other: Policy) -> Policy:
        return type(self).any_of(self, other)  # type: ignore[return-value]

    def __ror__(self, other: Policy) -> Policy:
        return type(self).any_of(other, self)  # type: ignore[return-value]

    def __and__(self, other: Policy) -> Policy:
        return type(self).all_of(self, other)  # type: ignore[return-value]

    def __rand__(self, other: Policy) -> Policy:
        return type(self).all_of(other, self)  # type: ignore[return-value]


@dataclass(frozen=True, init=False, repr=False)
class Combination(Combinable[Policy]):
    sign: ClassVar[str]
    checked: ClassVar[Callable[[object], object]]
    shown: ClassVar[Callable[[object], str]] = policy_name
    policies: tuple[Policy, ...]

    def __init__(self, *policies: Policy) -> None:
        if not policies:
            raise OptionError("policies is (), but must hold one policy or more.")
        object.__setattr__(self, "policies", tuple(map(type(self).checked, policies)))

    def __repr__(self) -> str:
        return f" {self.sign} ".join(map(type(self).shown, self.policies)).join("()")
