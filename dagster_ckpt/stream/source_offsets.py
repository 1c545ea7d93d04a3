"""Where a start lets Kafka sources continue, if not where they stopped."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dagster_ckpt.errors import OptionError
from dagster_ckpt.values.untrusted import from_json

_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:")
_EXAMPLES = '{"orders": {"0": 124}} for single partitions, or {"orders": "2026-11-23T07:00:00Z"} for a time'


@dataclass(frozen=True)
class SourceOffsets:
    """Chosen positions in Kafka topics. Other partitions continue where they stopped.

    Attributes:
        partitions: Topic to partition to the offset of the next record.
        times: Topic to a time in ms: the next record is the first that is not older.
    """

    partitions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    times: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> SourceOffsets:
        """Parse the option `source_offsets`; OptionError if it is not such JSON."""
        try:
            told = from_json(text)
            if not isinstance(told, dict) or not told:
                raise TypeError("it names no topic")
            partitions = {topic: _offsets(value) for topic, value in told.items() if isinstance(value, dict)}
            times = {topic: _time_ms(value) for topic, value in told.items() if not isinstance(value, dict)}
        except (ValueError, TypeError) as error:
            raise OptionError(f"source_offsets is {text!r}: {error}. Give {_EXAMPLES}.") from error
        return SourceOffsets(partitions, times)

    def __str__(self) -> str:
        """The option, with times in UTC."""
        import pendulum  # noqa: PLC0415 - see _time_ms

        times = {topic: pendulum.from_timestamp(ms / 1000).to_iso8601_string() for topic, ms in self.times.items()}
        return json.dumps({**self.partitions, **times}, sort_keys=True)


def _offsets(value: dict[str, object]) -> dict[str, int]:
    found: dict[str, int] = {}
    for partition, offset in value.items():
        if not partition.isdecimal() or type(offset) is not int or offset < 0:
            raise ValueError(f"partition {partition!r} with offset {offset!r} is not valid")
        found[partition] = offset
    if not found:
        raise ValueError("a topic has no partition")
    return found


def _time_ms(value: object) -> int:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is neither partitions nor a time")
    # Slow to import, and few starts choose offsets.
    import pendulum  # noqa: PLC0415

    moment = pendulum.parse(value, strict=True) if _MOMENT.match(value) else None
    if not isinstance(moment, pendulum.DateTime):
        raise TypeError(f"{value!r} has no date and time")
    return round(moment.timestamp() * 1000)
