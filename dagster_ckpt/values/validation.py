"""Validators of values, and how an option is described. The check and the message come from the same value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from importlib import import_module
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from dagster_ckpt.errors import OptionError, OptionTypeError

# Flink keeps counts in a Java `int` and durations in a Java `long`: the same limits keep programs portable.
INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1
# The longest duration that a getter can return as a timedelta.
TIMEDELTA_MAX_MS = timedelta.max // timedelta(milliseconds=1)

Member = TypeVar("Member", bound=Enum)


def _found(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"


@dataclass(frozen=True)
class WholeNumber:
    """An integer option with an inclusive range.

    Attributes:
        option: Its name in messages.
        minimum: Smallest accepted value.
        maximum: Largest accepted value.
        unit: What is counted, with a leading "of", or empty.
    """

    option: str
    minimum: int
    maximum: int = INT_MAX
    unit: str = ""

    @property
    def allowed(self) -> str:
        """The accepted values as text."""
        what = f"a whole number {self.unit}".rstrip()
        return f"{what} from {self.minimum} to {self.maximum}"

    def typed(self, value: object) -> int:
        """Return the value if it has the right type, even if it is out of range.

        Raises:
            OptionTypeError: It is not an integer; `True` and `False` are not integers here.
        """
        if isinstance(value, bool) or not isinstance(value, int):
            raise OptionTypeError(f"{self.option} is {_found(value)}, but must be {self.allowed}.")
        return value

    def checked(self, value: object) -> int:
        """Validate the value and return it.

        Raises:
            OptionTypeError: It has the wrong type, see `typed`.
            OptionError: It is out of range.
        """
        number = self.typed(value)
        if not self.minimum <= number <= self.maximum:
            raise OptionError(f"{self.option} is {value!r}, but must be {self.allowed}.")
        return number


@dataclass(frozen=True)
class Milliseconds(WholeNumber):
    """A duration option: an integer of milliseconds, or a `datetime.timedelta`."""

    maximum: int = LONG_MAX
    unit: str = "of milliseconds or a timedelta,"

    def typed(self, value: object) -> int:
        """Return the duration in milliseconds; fractions of a millisecond are dropped.

        Raises:
            OptionTypeError: It is neither an integer nor a timedelta.
        """
        if isinstance(value, timedelta):
            return value // timedelta(milliseconds=1)
        return super().typed(value)


@dataclass(frozen=True)
class Switch:
    """An option that is on or off.

    Attributes:
        option: Its name in messages.
        allowed: The accepted values in words.
    """

    option: str
    allowed: ClassVar[str] = "True or False"

    def checked(self, value: object) -> bool:
        """Return the value if it is a boolean.

        Raises:
            OptionTypeError: It is anything else, including 0, 1 and None.
        """
        if not isinstance(value, bool):
            raise OptionTypeError(f"{self.option} is {_found(value)}, but must be {self.allowed}.")
        return value


@dataclass(frozen=True)
class Choice(Generic[Member]):
    """An option whose value is a member of an enum.

    Attributes:
        option: Its name in messages.
        enum: The enum.
    """

    option: str
    enum: type[Member]

    @property
    def allowed(self) -> str:
        """The accepted values as text."""
        return "one of " + ", ".join(str(member) for member in self.enum)

    def checked(self, value: object) -> Member:
        """Return the value if it is a member of the enum.

        Raises:
            OptionTypeError: It is anything else.
        """
        if not isinstance(value, self.enum):
            raise OptionTypeError(f"{self.option} is {_found(value)}, but must be {self.allowed}.")
        return value

    def named(self, value: object) -> Member:
        """Return the member, given the member or its name: YAML and the Dagster launchpad have only names.

        Raises:
            OptionError: It is a string, but not the name of a member.
            OptionTypeError: It is neither a string nor a member.
        """
        if not isinstance(value, str) or isinstance(value, self.enum):
            return self.checked(value)
        if value not in self.enum.__members__:
            raise OptionError(f"{self.option} is {value!r}, but must be {self.allowed}.")
        return self.enum[value]


_STREAM_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def checked_stream_id(stream_id: object, option: str = "stream_id") -> str:
    """Validate a stream id, which must not name a path outside its folder, and return it."""
    if not isinstance(stream_id, str) or not _STREAM_ID.fullmatch(stream_id):
        raise OptionError(
            f"{option} is {stream_id!r}, but must be 1 to 128 letters, digits, '_', '.' and '-', a letter or digit "
            "first: it names a folder."
        )
    return stream_id


def imported(path: object, option: str, wanted: str) -> Any:
    """Import the object at an import path, `module:name` or `module.name`.

    Args:
        path: The path, such as company.queries:late_orders.
        option: The option that holds it, for the message.
        wanted: What it must name, for the message, such as "a function".
    """
    module, _, name = path.replace(":", ".").rpartition(".") if isinstance(path, str) else ("", "", "")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(
            f"{option} is {path!r}, which cannot be imported: {error}. Give the import path of {wanted}, such as "
            "company.module:name, in a module that this process can import."
        ) from error


class Effect(Enum):
    """Kind of effect that an option has on Spark.

    Attributes:
        REAL: The engine or the coordinator implements exactly this.
        MAPPED: A Spark mechanism with the same purpose implements it.
        NONE: Not applicable, for the reason given.
    """

    REAL = "real"
    MAPPED = "mapped"
    NONE = "none"


class OptionDescription(NamedTuple):
    """One entry in the result of `describe`.

    Attributes:
        option: Its keyword, as in `CheckpointConfig(interval=…)`.
        value: The value as set; durations in ms.
        effect: How it takes effect.
        explanation: What that means for this value.
    """

    option: str
    value: object
    effect: Effect
    explanation: str


def policy_name(policy: object) -> str:
    """Return a policy as text: its `repr` if its class defines one, otherwise the name of its class.

    Example:
        >>> class Own:
        ...     pass
        >>> policy_name(Own()), policy_name(3)
        ('Own()', '3')
    """
    if type(policy).__repr__ is object.__repr__:
        return f"{type(policy).__name__}()"
    try:
        return repr(policy)
    except Exception:  # noqa: BLE001 - a user's `__repr__` must not hide what the policy decided
        return f"{type(policy).__name__}()"
