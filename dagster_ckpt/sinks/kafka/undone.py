"""What a roll-back has undone in a topic, which keeps its records, and how a reader continues behind it.

A stream that goes back with a new query id leaves the undone records between where its kept batches end and where the
topic ends when its writers are fenced. The claim of the new query commits these ranges with its markers. A reader
that has not read them reads up to the range, and continues behind it; a note in the folder of its source records that.

Executors import this module, so it imports little.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Each roll-back adds a range, and the metadata of a commit has 4,096 bytes.
_MOST = 6
NOTE = "dagster_ckpt_skipped"


@dataclass(frozen=True)
class Undone:
    """A range of offsets of one partition; without `begin`, anything before `end` may be undone."""

    begin: int | None
    end: int

    def __str__(self) -> str:
        return f"{'' if self.begin is None else self.begin}-{self.end}"

    def has(self, offset: int) -> bool:
        return (self.begin or 0) <= offset < self.end


# In ascending order, by partition.
UndoneRanges = Mapping[int, Sequence[Undone]]


def as_text(ranges: Iterable[Undone]) -> str:
    return ",".join(map(str, ranges))


def parse(text: str) -> list[Undone]:
    """Parse what `as_text` wrote; anything else is a ValueError."""
    found = []
    for each in text.split(",") if text else ():
        begin, _, end = each.partition("-")
        found.append(Undone(int(begin) if begin else None, int(end)))
    return found


def with_undone(before: Sequence[Undone], begin: int | None, end: int) -> list[Undone]:
    """Add what was written from `begin` to `end`; of too many ranges, the oldest become one."""
    if begin == end:
        return list(before)
    kept = [] if begin is None else [each for each in before if each.end <= begin]
    found = [*kept, Undone(begin, end)]
    if len(found) <= _MOST:
        return found
    return [Undone(None, found[-_MOST].end), *found[1 - _MOST :]]


@dataclass(frozen=True)
class TopicEnd:
    """Where the batches of a savepoint end in a topic, and what had been undone before."""

    ends: Mapping[int, int]
    undone: UndoneRanges

    def as_record(self) -> dict[str, Any]:
        return {
            "ends": {str(partition): end for partition, end in self.ends.items()},
            "undone": {str(partition): as_text(ranges) for partition, ranges in self.undone.items()},
        }

    @staticmethod
    def of_record(record: object) -> TopicEnd | None:
        try:
            found: Any = record
            return TopicEnd(
                {int(partition): int(end) for partition, end in found["ends"].items()},
                {int(partition): parse(text) for partition, text in found["undone"].items()},
            )
        except (LookupError, TypeError, ValueError, AttributeError):
            return None


@dataclass(frozen=True)
class NextRead:
    """What a reader has to do next: read `up_to` these offsets, or continue `behind` others, or nothing."""

    up_to: Mapping[int, int] | None = None
    behind: Mapping[int, int] | None = None
    obstacle: str = ""


def next_read(read: Mapping[int, int], planned: Mapping[int, int] | None, undone: UndoneRanges) -> NextRead:
    """Decide by each partition's next offset, and the end of the planned batch, if any."""
    ahead = {
        partition: next((each for each in undone.get(partition, ()) if each.end > offset), None)
        for partition, offset in read.items()
    }
    ranges = {partition: each for partition, each in ahead.items() if each is not None}
    if not ranges:
        return NextRead()
    begins = {partition: each.begin for partition, each in ranges.items() if each.begin is not None}
    if len(begins) < len(ranges):
        return NextRead(obstacle="where the undone records begin is no longer recorded")
    if any(read[partition] > begin for partition, begin in begins.items()):
        return NextRead(obstacle="it has read some of the undone records")
    if planned is not None:
        if any(planned.get(partition, 0) > begin for partition, begin in begins.items()):
            return NextRead(obstacle="its next batch is planned, and reads undone records")
        return NextRead(up_to={**read, **planned})
    if any(read[partition] < begin for partition, begin in begins.items()):
        return NextRead(up_to={**read, **begins})
    return NextRead(behind={**read, **{partition: each.end for partition, each in ranges.items()}})


def noted(before: bytes | None, topic: str, read: Mapping[int, int], behind: Mapping[int, int]) -> bytes:
    skipped: dict[str, dict[str, str]] = json.loads(before) if before else {}
    mine = skipped.setdefault(topic, {})
    for partition, end in behind.items():
        mine[str(partition)] = as_text([*parse(mine.get(str(partition), "")), Undone(read[partition], end)])
    return json.dumps(skipped).encode()


def skipped_in(note: bytes | None, topic: str) -> dict[int, list[Undone]]:
    """Return the skipped parts of a topic; ValueError if the note cannot be read."""
    found = json.loads(note) if note else {}
    try:
        return {int(partition): parse(text) for partition, text in found.get(topic, {}).items()}
    except (AttributeError, TypeError) as error:
        raise ValueError(str(error)) from error
