"""Description of one option for users: its value and its effect on a Spark query."""

from enum import Enum
from typing import NamedTuple


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
