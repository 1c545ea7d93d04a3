"""Where the batches of a stream begin in its topic.

Before a writer sends its share of a batch, it asks for the end of each partition, and commits the answers in the same
transaction. All earlier batches end before, and the share's records come after. So the lowest of all writers is where
the batch begins, and a reader with a higher offset has read of it.

Executors import this module, so it imports little.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Of each partition, as far as the metadata of one commit allows.
_KEPT, _KEPT_OF_ALL = 16, 4_000
_OF_QUERY = 8


@dataclass(frozen=True)
class Position:
    """Where a batch begins in a partition.

    Attributes:
        epoch: Of the live directory: token and generation. Its batches ascend.
        query: Begin of the query's id.
    """

    batch: int
    offset: int
    epoch: tuple[int, int]
    query: str


def query_mark(query_id: str) -> str:
    return query_id[:_OF_QUERY]


def with_position(text: str, new: Position, partitions: int) -> str:
    """The newest positions of a partition as text; `partitions`: of the topic."""
    token, generation = new.epoch
    kept = max(min(_KEPT, _KEPT_OF_ALL // max(partitions, 1)), 2)
    entry = f"{new.batch}:{new.offset}:{token}:{generation}:{new.query}"
    return ",".join([*(text.split(",") if text else ()), entry][-kept:])


def positions_in(text: str) -> list[Position]:
    """Raises ValueError if it is not what `with_position` wrote."""
    found = []
    for entry in text.split(",") if text else ():
        batch, offset, token, generation, query = entry.split(":")
        found.append(Position(int(batch), int(offset), (int(token), int(generation)), query))
    return found


def begins_of_batches(of_writers: Iterable[Sequence[Position]]) -> list[Position]:
    """Of one partition, in the order in which they were written."""
    lowest: dict[tuple[tuple[int, int], int], Position] = {}
    for positions in of_writers:
        for each in positions:
            key = (each.epoch, each.batch)
            if key not in lowest or each.offset < lowest[key].offset:
                lowest[key] = each
    return [lowest[key] for key in sorted(lowest)]


def newest_read(
    read: Mapping[int, int], begins: Mapping[int, Sequence[Position]], current: str, *, rewound: bool
) -> tuple[int | None, int, str]:
    """As of `ReadOfSink`. An upper bound if all positions that are kept are later.

    Args:
        read: The next offset that it reads, by partition.
        begins: Where batches begin, in the order in which they were written, by partition.
        current: `query_mark` of the writing query.
        rewound: Whether the writing stream ever went back.
    """
    every = {(each.epoch, each.batch): each for positions in begins.values() for each in positions}
    written = [every[key] for key in sorted(every)]
    newest: int | None = None
    undone: set[tuple[tuple[int, int], int]] = set()
    for partition, offset in read.items():
        if offset <= 0:
            continue
        positions = begins.get(partition, ())
        if not positions:
            return None, 0, f"where batches begin in partition {partition} is"
        seen = [each for each in positions if each.offset < offset]
        if not seen:
            before = positions[0].batch - 1
            newest = max(before, -1 if newest is None else newest) if before >= 0 else newest
        for each in seen:
            # Of a query that was replaced, whose batches were written once more.
            if any(other.epoch > each.epoch and other.batch <= each.batch for other in written):
                undone.add((each.epoch, each.batch))
            else:
                newest = max(each.batch, -1 if newest is None else newest)
    if rewound and newest is not None and written[-1].query != current:
        return None, 0, "the stream has written no batch since it went back, and the position is"
    return newest, len(undone), ""
