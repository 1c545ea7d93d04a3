"""Policies as data: in YAML, on the launchpad, and in the run config of a schedule.

A policy is its name with its arguments: `{"any_of": [{"latest": 3}, {"newest_per": {"period": "day", "count": 7}}]}`.
One of your own has an import path: `{"own": "company.policies:NewestVerified"}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Generic, TypeVar

from dagster_ckpt.errors import OptionError
from dagster_ckpt.policies import retention, trigger
from dagster_ckpt.policies.retention import KeepRules, RetentionPolicy, checked_retention
from dagster_ckpt.policies.trigger import Blackout, OutsideBlackouts, TriggerPolicy, checked_trigger
from dagster_ckpt.values.validation import imported, policy_name

Policy = TypeVar("Policy")

Written = Mapping[str, object]

OWN = "own"
# The field of a policy that contains another one.
_OF = "of"


@dataclass(frozen=True)
class _Vocabulary(Generic[Policy]):
    option: str
    rules: Mapping[str, Callable[..., Policy]]
    combinators: Mapping[str, Callable[..., Policy]]
    checked: Callable[[object], Policy]

    def read(self, written: object) -> Policy:
        if not isinstance(written, Mapping) or len(written) != 1:
            raise OptionError(
                f"{self.option} is {written!r}, but must be one name with its arguments, such as {{latest: 3}}. "
                f"Combine several with any_of or all_of. The names are {self._names()}."
            )
        [(name, arguments)] = written.items()
        if name == OWN:
            return self.checked(own_policy(self.option, arguments))
        if name in self.combinators:
            members = arguments if isinstance(arguments, Sequence) and not isinstance(arguments, str) else [arguments]
            return self.combinators[name](*(self.read(member) for member in members))
        if name not in self.rules:
            raise OptionError(f"{self.option} is {written!r}, but must be one of {self._names()}.")
        if isinstance(arguments, Mapping) and isinstance(arguments.get(_OF), Mapping):
            arguments = {**arguments, _OF: self.read(arguments[_OF])}
        return _made(f"{self.option} {name}", self.rules[name], arguments)

    def write(self, policy: Policy) -> Written:
        for name, kind in self.combinators.items():
            if type(policy) is kind:
                return {name: [self.write(member) for member in getattr(policy, "policies", ())]}
        for name, kind in self.rules.items():
            if type(policy) is kind:
                arguments, of = _arguments(policy), getattr(policy, _OF, None)
                return {name: arguments if of is None else {**arguments, _OF: self.write(of)}}
        return {OWN: _path_of(self.option, policy)}

    def _names(self) -> str:
        return ", ".join([*self.rules, *self.combinators, OWN])


def _outside_blackouts(*windows: Mapping[str, object]) -> OutsideBlackouts:
    return OutsideBlackouts(*(_made("blackout", Blackout, window) for window in windows))


_RETENTION: _Vocabulary[RetentionPolicy] = _Vocabulary(
    "retention",
    {
        "latest": retention.Latest,
        "younger_than": retention.YoungerThan,
        "every": retention.Every,
        "newest_per": retention.NewestPer,
        "keep_rules": KeepRules,
        "max_bytes": retention.MaxBytes,
        "savepoint_history": retention.SavepointHistory,
    },
    {"any_of": retention.AnyOf, "all_of": retention.AllOf},
    checked_retention,
)
_TRIGGER: _Vocabulary[TriggerPolicy] = _Vocabulary(
    "trigger",
    {
        "interval": trigger.Interval,
        "min_pause": trigger.MinPause,
        "every_batches": trigger.EveryBatches,
        "every_rows": trigger.EveryRows,
        "outside_blackouts": _outside_blackouts,
    },
    {"any_of": trigger.AnyOf, "all_of": trigger.AllOf},
    checked_trigger,
)


def read_retention(written: object) -> RetentionPolicy:
    """Create a retention policy from data.

    Example:
        >>> read_retention({"any_of": [{"latest": 3}, {"younger_than": 3_600_000}]})
        (Latest(count=3) | YoungerThan(max_age_ms=3600000))
    """
    return _RETENTION.read(written)


def write_retention(policy: RetentionPolicy) -> Written:
    """The reverse of `read_retention`.

    Example:
        >>> write_retention(retention.Latest(3))
        {'latest': {'count': 3}}
    """
    return _RETENTION.write(policy)


def read_trigger(written: object) -> TriggerPolicy:
    """Create a trigger policy from data.

    Example:
        >>> read_trigger({"all_of": [{"interval": 60_000}, {"every_batches": 10}]})
        (Interval(interval_ms=60000, first_after_ms=0) & EveryBatches(batches=10))
    """
    return _TRIGGER.read(written)


def own_policy(option: str, written: object) -> object:
    """Import a policy by its path, or by `path` and `arguments`; a class is instantiated."""
    path, arguments = written, None
    if isinstance(written, Mapping):
        path, arguments = written.get("path"), written.get("arguments")
    found = imported(option, path, "the import path of a policy, such as company.policies:NewestVerified")
    return _made(f"{option} {path}", found, arguments) if isinstance(found, type) else found


def _made(option: str, kind: Callable[..., Policy], arguments: object) -> Policy:
    try:
        if arguments is None:
            return kind()
        if isinstance(arguments, Mapping):
            return kind(**arguments)
        if isinstance(arguments, Sequence) and not isinstance(arguments, str):
            return kind(*arguments)
        return kind(arguments)
    except OptionError:
        raise
    except TypeError as error:
        raise OptionError(f"{option} has the arguments {arguments!r}, which it does not accept: {error}.") from error


def _arguments(policy: object) -> dict[str, object]:
    if not is_dataclass(policy):
        return {}
    return {field.name: _plain(getattr(policy, field.name)) for field in fields(policy) if field.init}


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _path_of(option: str, policy: object) -> Written:
    kind = type(policy)
    path, arguments = f"{kind.__module__}:{kind.__qualname__}", _arguments(policy)
    written: Written = {"path": path, "arguments": arguments} if arguments else {"path": path}
    try:
        again = own_policy(option, written)
    except OptionError as error:
        again = error
    if type(again) is not kind or _arguments(again) != arguments:
        raise OptionError(
            f"{option} is {policy_name(policy)}, which cannot be written as data. Define its class in a module, and "
            "make it a dataclass with plain values or a class without arguments."
        )
    return written
