"""Which source of a query continues which source of its state, and where new ones begin."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from dagster_ckpt.errors import OptionError

_EXAMPLE = "such as '0=1,1=new:earliest': source 0 continues the former source 1, source 1 is new"
_KEY = re.compile(r"[\w-]+")
_NEW, _FORMER = "new", "former"


class Beginning(StrEnum):
    """Where a new source begins to read.

    AS_CODE: Where the options of the source say, such as Kafka's `startingOffsets`.
    EARLIEST: At the oldest record that it has.
    LATEST: After the newest record that it has when the start looks.
    """

    AS_CODE = "as the options of the source say"
    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True)
class SourceMapping:
    """Sources by their names, or else by their numbers in the query.

    Attributes:
        continued: A source of the query to the source of the state that it continues.
        new: Sources of the query that read what none has read before.
    """

    continued: Mapping[str, str] = field(default_factory=dict)
    new: Mapping[str, Beginning] = field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> SourceMapping:
        """The option `map_sources`; OptionError if it is not such a list."""
        continued: dict[str, str] = {}
        new: dict[str, Beginning] = {}
        for each in text.split(","):
            source, equals, value = (part.strip() for part in each.partition("="))
            if not equals or not _KEY.fullmatch(source):
                raise _unreadable(text, f"{each.strip()!r} is not of the form source=former source")
            if source in continued or source in new:
                raise _unreadable(text, f"it names source {source} twice")
            word, _, where = value.partition(":")
            if word == _FORMER and where:
                # So that a former source can be called `new`.
                word, value, where = "", where, ""
            if word == _NEW:
                new[source] = _beginning(text, where)
            elif where or not _KEY.fullmatch(value):
                raise _unreadable(text, f"{value!r} is neither a former source nor new, new:earliest or new:latest")
            elif value in continued.values():
                raise _unreadable(text, f"two sources continue the former source {value}")
            else:
                continued[source] = value
        return SourceMapping(continued, new)

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.continued, *self.new)

    def __str__(self) -> str:
        kept = [
            f"{source}={_FORMER}:{former}" if former == _NEW else f"{source}={former}"
            for source, former in self.continued.items()
        ]
        added = [
            f"{source}={_NEW}" + (f":{where.value}" if where is not Beginning.AS_CODE else "")
            for source, where in self.new.items()
        ]
        return ",".join(sorted([*kept, *added], key=_order))


def _order(entry: str) -> tuple[int, str]:
    source = entry.partition("=")[0]
    return (int(source) if source.isdecimal() else -1, source)


def _beginning(text: str, where: str) -> Beginning:
    if not where:
        return Beginning.AS_CODE
    if where in (Beginning.EARLIEST.value, Beginning.LATEST.value):
        return Beginning(where)
    raise _unreadable(text, f"a new source cannot begin at {where!r}, only at earliest or latest, or with plain new")


def _unreadable(text: str, why: str) -> OptionError:
    return OptionError(f"map_sources is {text!r}: {why}. Give a list, {_EXAMPLE}.")
