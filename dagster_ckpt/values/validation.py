"""Validators of values, and `Option`, whose one declaration validates and describes an option."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from datetime import timedelta
from difflib import get_close_matches
from enum import Enum
from importlib import import_module
from inspect import getattr_static
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from dagster_ckpt.errors import OptionError, OptionTypeError

# Flink's limits: counts are a Java `int`, durations a `long`. The last one is the longest timedelta.
INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1
TIMEDELTA_MAX_MS = timedelta.max // timedelta(milliseconds=1)

Member = TypeVar("Member", bound=Enum)
Given_contra = TypeVar("Given_contra", contravariant=True)
Value_co = TypeVar("Value_co", covariant=True)


def type_error(option: str, value: object, allowed: str) -> OptionTypeError:
    return OptionTypeError(f"{option} is {value!r} ({type(value).__name__}), but must be {allowed}.")


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    near = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]}?" if near else ""


@dataclass(frozen=True)
class WholeNumber:
    option: str
    minimum: int
    maximum: int = INT_MAX
    unit: str = ""
    plain: ClassVar[type] = int

    @property
    def allowed(self) -> str:
        what = f"a whole number {self.unit}".rstrip()
        return f"{what} from {self.minimum} to {self.maximum}"

    def typed(self, value: object) -> int:
        """Check the type only: any integer, but no bool."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise type_error(self.option, value, self.allowed)
        return value

    def checked(self, value: object) -> int:
        number = self.typed(value)
        if not self.minimum <= number <= self.maximum:
            raise OptionError(f"{self.option} is {value!r}, but must be {self.allowed}.")
        return number


@dataclass(frozen=True)
class Milliseconds(WholeNumber):
    """Milliseconds, or a timedelta, whose fractions of a millisecond are dropped."""

    maximum: int = LONG_MAX
    unit: str = "of milliseconds or a timedelta,"

    def typed(self, value: object) -> int:
        if isinstance(value, timedelta):
            return value // timedelta(milliseconds=1)
        return super().typed(value)


@dataclass(frozen=True)
class Switch:
    option: str
    allowed: ClassVar[str] = "True or False"
    plain: ClassVar[type] = bool

    def checked(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise type_error(self.option, value, self.allowed)
        return value


@dataclass(frozen=True)
class Choice(Generic[Member]):
    option: str
    enum: type[Member]
    plain: ClassVar[type] = str

    @property
    def allowed(self) -> str:
        return "one of " + ", ".join(str(member) for member in self.enum)

    def member(self, value: object) -> Member:
        """Return a member; its name is refused, as in PyFlink."""
        if not isinstance(value, self.enum):
            raise type_error(self.option, value, self.allowed)
        return value

    def checked(self, value: object) -> Member:
        """Return a member, which may be given by its name, as in YAML."""
        if not isinstance(value, str) or isinstance(value, self.enum):
            return self.member(value)
        if value not in self.enum.__members__:
            raise OptionError(f"{self.option} is {value!r}, but must be {self.allowed}.")
        return self.enum[value]


@dataclass(frozen=True)
class Converted(Generic[Value_co]):
    """A value that a function validates and converts; `plain` is its type in YAML and in Dagster's config."""

    checked: Callable[[Any], Value_co]
    allowed: str
    plain: Any


class Effect(Enum):
    """An option's effect on Spark.

    Attributes:
        REAL: Exactly this is implemented.
        MAPPED: A Spark mechanism with the same purpose implements it.
        NONE: Not applicable, for the reason given.
    """

    REAL = "real"
    MAPPED = "mapped"
    NONE = "none"


class OptionDescription(NamedTuple):
    """An option, as `describe` returns it; `explanation` says what the effect means for this value."""

    option: str
    value: object
    effect: Effect
    explanation: str


class _Rule(Protocol[Value_co]):
    @property
    def allowed(self) -> str: ...
    @property
    def plain(self) -> Any: ...
    @property
    def checked(self) -> Callable[[Any], Value_co]: ...


Described = tuple[Effect, str]


class Option(Generic[Given_contra, Value_co]):
    """A field of a frozen dataclass, from which keywords, config, YAML and pages are derived.

    Args:
        default: If None, the option accepts None.
        effect: One sentence, under Spark; two, for a value and for None, 0 and False; or a function of all options.
        unset: What applies while it is None.
        replaces: The option that it replaces.
    """

    def __init__(
        self,
        rule: _Rule[Any],
        *,
        default: Value_co,
        description: str,
        effect: str | tuple[str, str] | Callable[[Any], Described],
        unset: str = "",
        replaces: str | None = None,
    ) -> None:
        self.rule = rule
        self.default = default
        self.description = description
        self.unset = unset
        self.replaces = replaces
        self._effect = effect
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, options: object | None, owner: type) -> Value_co:
        if options is None:
            return self.default
        value: Value_co = options.__dict__[self._name]
        return value

    def __set__(self, options: object, value: Given_contra) -> None:
        is_unset = value is None and self.default is None
        options.__dict__[self._name] = None if is_unset else self.rule.checked(value)

    def described(self, options: object) -> OptionDescription:
        value = self.__get__(options, type(options))
        if callable(self._effect):
            return OptionDescription(self._name, value, *self._effect(options))
        texts = self._effect if isinstance(self._effect, tuple) else (self._effect, self._effect)
        return OptionDescription(self._name, value, Effect.REAL, texts[0] if value else texts[1])


def options_of(kind: type) -> dict[str, Option[Any, Any]]:
    return {each.name: getattr_static(kind, each.name) for each in fields(kind)}


def conforming(option: str, value: Any, kind: Any) -> Any:
    """Return a value of an annotated kind; OptionError or OptionTypeError if it does not conform.

    An enum member may be given by name or value, a tuple as a list.
    """
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    is_union = get_origin(kind) in (Union, UnionType)
    kinds = [get_origin(each) or each for each in (get_args(kind) if is_union else (kind,))]
    for each in kinds:
        if isinstance(value, str) and isinstance(each, type) and issubclass(each, Enum):
            return _member(option, value, each)
    if tuple in kinds and isinstance(value, list):
        return tuple(value)
    is_number = float in kinds and type(value) is int
    is_letters = isinstance(value, str) and str not in kinds and object not in kinds
    is_switch = isinstance(value, bool) and bool not in kinds
    if (isinstance(value, tuple(kinds)) or is_number) and not is_letters and not is_switch:
        return value
    raise type_error(option, value, " or ".join("None" if each is NoneType else each.__name__ for each in kinds))


def _member(option: str, value: str, kind: type[Member]) -> Member:
    if value in kind.__members__:
        return kind[value]
    try:
        return kind(value)
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(f"{option} is {value!r}, but must be one of {', '.join(kind.__members__)}.") from error


def conform_fields(declared: Any) -> None:
    kinds = get_type_hints(type(declared))
    for each in fields(declared):
        name = f"{type(declared).__name__}: {each.name}"
        object.__setattr__(declared, each.name, conforming(name, getattr(declared, each.name), kinds[each.name]))


IMPORT_PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)[.:]([A-Za-z_]\w*)")


def imported(option: str, path: object, allowed: str = "an import path such as 'package.module:Name'") -> Any:
    """Import "package.module:Name" or "package.module.Name"; OptionError if that fails."""
    parts = IMPORT_PATH.fullmatch(path) if isinstance(path, str) else None
    if parts is None:
        raise OptionError(f"{option} is {path!r}, but must be {allowed}.")
    try:
        return getattr(import_module(parts[1]), parts[2])
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(
            f"{option} is {path!r}, which cannot be imported: {error}. It must be {allowed}, in a module that this "
            "process can import."
        ) from error


_STREAM_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def checked_stream_id(stream_id: object) -> str:
    if not isinstance(stream_id, str) or not _STREAM_ID.fullmatch(stream_id):
        raise OptionError(
            f"stream_id is {stream_id!r}, which cannot name a folder. Use letters, digits, '_', '-' and '.', beginning "
            "with a letter or digit, 128 at most."
        )
    return stream_id


def policy_name(policy: object) -> str:
    if type(policy).__repr__ is object.__repr__:
        return f"{type(policy).__name__}()"
    try:
        return repr(policy)
    except Exception:  # noqa: BLE001 - a user's `__repr__`
        return f"{type(policy).__name__}()"
