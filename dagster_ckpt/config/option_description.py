"""One option as a user reads it: its value, and what it does to a Spark query."""

from enum import Enum
from typing import NamedTuple


class Effect(Enum):
    """How an option takes effect.

    Attributes:
        REAL: The engine or the coordinator does exactly this.
        MAPPED: A mechanism of Spark with the same purpose does it.
        NONE: Not applicable, for the reason given.
    """

    REAL = "real"
    MAPPED = "mapped"
    NONE = "none"


class OptionDescription(NamedTuple):
    """One line of what `describe` answers.

    Attributes:
        option: Its keyword, as in `CheckpointConfig(interval=…)`.
        value: The value asked for; durations in ms.
        effect: How it takes effect.
        sentence: What that means for this value.
    """

    option: str
    value: object
    effect: Effect
    sentence: str
