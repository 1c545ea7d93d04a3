"""Markers of the transactional sink: who may write, which batch is written, and where batches begin in the topic.

Before a writer sends its share of a batch, it asks for the end of each partition, and commits the answers in the same
transaction. Earlier batches end before, and the share's records come after: a batch begins at the lowest answer, and a
reader with a higher offset has read of it.

Executors import this module, so it imports little.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dagster_ckpt.errors import LeaseLostError, OptionError
from dagster_ckpt.sinks.kafka.undone import UndoneRanges

FORMAT = 2
# With the other fields, three quarters of the 4,096 bytes of `offset.metadata.max.bytes`.
MOST_EARLIER = 40


@dataclass(frozen=True, order=True)
class Epoch:
    """Orders a stream's live directories: by the lease's token, then by number."""

    token: int = 0
    generation: int = 0


@dataclass(frozen=True)
class Transactions:
    """What a share needs to know of its sink and of the run that writes it.

    Attributes:
        client: Properties for librdkafka; they may contain secrets.
        topic: Its partition 0 names the markers.
        prefix: Begins the ids of transactions and groups; unique among deployments that share a cluster.
    """

    client: Mapping[str, str] = field(repr=False)
    topic: str
    prefix: str
    writers: int
    deployment: str
    stream: str
    query_id: str
    epoch: Epoch
    owner: str
    entry: str = ""

    def id_of(self, writer: int) -> str:
        """The id of a writer to this topic, and of the group with its marker."""
        return f"{self.prefix}.{self.stream}:{self.topic}:{writer}"


@dataclass(frozen=True)
class Marker:
    """What a writer has committed with its newest share.

    Attributes:
        batch: The newest batch that it has written, or that a claim treats as written.
        entry: Digest of that batch's plan; empty if no share of it was written.
        earlier: Earlier queries of the stream, the newest last, each with its newest batch.
        positions: Where its batches begin in partition 0.
    """

    batch: int
    query: str
    deployment: str
    stream: str
    token: int
    generation: int
    owner: str
    writers: int
    entry: str = ""
    earlier: Mapping[str, int] = field(default_factory=dict)
    positions: str = ""
    undone: str = ""

    @property
    def epoch(self) -> Epoch:
        return Epoch(self.token, self.generation)

    def newest(self, query_id: str) -> int | None:
        return self.batch if self.query == query_id else self.earlier.get(query_id)

    def is_later(self, target: Transactions) -> bool:
        """Tokens are compared only within a deployment: a rebuilt catalog counts from 1 again."""
        return self.deployment == target.deployment and self.epoch > target.epoch

    def is_anothers(self, target: Transactions) -> bool:
        owner = (self.deployment, self.stream)
        # A rebuilt catalog may be another deployment; the query is the same.
        return owner != (target.deployment, target.stream) and self.newest(target.query_id) is None

    def as_metadata(self) -> str:
        fields = {name: value for name, value in asdict(self).items() if name != "batch"}
        return json.dumps({"format": FORMAT, **fields}, separators=(",", ":"))

    @staticmethod
    def of(group: str, offset: int, metadata: str | None) -> Marker | None:
        if offset < 0:
            return None
        fields = fields_of(metadata)
        if fields is not None and fields["format"] != FORMAT:
            raise OptionError(
                f"The marker in consumer group {group!r} has format {fields['format']!r}, and this version of "
                f"dagster_ckpt reads format {FORMAT}. Nothing was written. Run the version that wrote it, or give the "
                "sink another kafka.transactional.id and start from a snapshot with new_query_id, which may write "
                "rows a second time."
            )
        try:
            fields = fields or {}
            return Marker(
                offset - 1,
                str(fields["query"]),
                str(fields["deployment"]),
                str(fields["stream"]),
                int(fields["token"]),
                int(fields["generation"]),
                str(fields["owner"]),
                int(fields["writers"]),
                str(fields["entry"]),
                {str(query): int(batch) for query, batch in fields["earlier"].items()},
                str(fields.get("positions", "")),
                str(fields.get("undone", "")),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OptionError(
                f"Consumer group {group!r} has committed offset {offset} with metadata {metadata!r}, which this sink "
                "did not write. The names of its groups begin with kafka.transactional.id: give the sink one that "
                "no other application uses."
            ) from error


def metadata_of(positions: str, undone: str) -> str:
    return json.dumps({"format": FORMAT, "positions": positions, "undone": undone}, separators=(",", ":"))


def positions_of(metadata: str | None) -> str:
    """Return positions in metadata of a marker or `metadata_of`; empty for other offsets."""
    return str((fields_of(metadata) or {}).get("positions", ""))


def undone_of(metadata: str | None) -> str:
    return str((fields_of(metadata) or {}).get("undone", ""))


def fields_of(metadata: str | None) -> dict[str, Any] | None:
    try:
        fields = json.loads(metadata or "")
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and "format" in fields else None


def earlier_queries(markers: Iterable[Marker], query_id: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for marker in markers:
        for query, batch in (*marker.earlier.items(), (marker.query, marker.batch)):
            if query != query_id:
                found[query] = max(batch, found.get(query, batch))
    return dict([*found.items()][-MOST_EARLIER:])


def refuse_others(target: Transactions, writer: int, marker: Marker | None) -> None:
    """Refuse a marker of a later run, or of another deployment or stream.

    Prefix `shop.eu` with stream `orders` has the ids of prefix `shop` with stream `eu.orders`.
    """
    if marker is None:
        return
    if marker.is_anothers(target):
        raise OptionError(
            f"Transactions {target.id_of(writer)} on topic {target.topic} belong to deployment {marker.deployment}, "
            f"stream {marker.stream!r}, and this is deployment {target.deployment}, stream {target.stream!r}. Nothing "
            "was written. Give the sink another kafka.transactional.id."
        )
    if marker.is_later(target):
        raise replaced(target, writer, marker)


def replaced(target: Transactions, writer: int, marker: Marker) -> LeaseLostError:
    said = (
        f"Writer {writer} of topic {target.topic} belongs to a later run of stream {target.stream!r}: this process was "
        "replaced. Nothing was written."
    )
    if marker.is_later(target):
        theirs, ours = (f"live-{each.generation}-{each.token}" for each in (marker.epoch, target.epoch))
        groups = f"{target.id_of(0).removesuffix('0')}*"
        said += (
            f" The later one has live directory {theirs}, and this one {ours}. If there is no later run, because the "
            "catalog was lost and its rebuilt one counts from 1 again: make sure that no other process of the stream "
            f"runs, delete the consumer groups {groups} with kafka-consumer-groups.sh, and start from a snapshot with "
            "new_query_id, which writes the rows after it a second time."
        )
    return LeaseLostError(said)


# Most positions of a partition, and of all, that fit into the metadata of one commit.
_KEPT, _KEPT_OF_ALL = 16, 4_000
_OF_QUERY = 8


@dataclass(frozen=True)
class Position:
    """Where a batch begins in a partition; `epoch` is of its live directory, `query` begins the query's id."""

    batch: int
    offset: int
    epoch: tuple[int, int]
    query: str


def query_mark(query_id: str) -> str:
    return query_id[:_OF_QUERY]


def with_position(text: str, new: Position, partitions: int) -> str:
    """Append a position; as many of the newest are kept as fit for a topic with `partitions`."""
    token, generation = new.epoch
    kept = max(min(_KEPT, _KEPT_OF_ALL // max(partitions, 1)), 2)
    entry = f"{new.batch}:{new.offset}:{token}:{generation}:{new.query}"
    return ",".join([*(text.split(",") if text else ()), entry][-kept:])


def positions_in(text: str) -> list[Position]:
    """Parse what `with_position` wrote; anything else is a ValueError."""
    found = []
    for entry in text.split(",") if text else ():
        batch, offset, token, generation, query = entry.split(":")
        found.append(Position(int(batch), int(offset), (int(token), int(generation)), query))
    return found


def begins_of_batches(of_writers: Iterable[Sequence[Position]]) -> list[Position]:
    """Return the lowest position of each batch in one partition, in order of writing."""
    lowest: dict[tuple[tuple[int, int], int], Position] = {}
    for positions in of_writers:
        for each in positions:
            key = (each.epoch, each.batch)
            if key not in lowest or each.offset < lowest[key].offset:
                lowest[key] = each
    return [lowest[key] for key in sorted(lowest)]


def newest_read(
    read: Mapping[int, int],
    begins: Mapping[int, Sequence[Position]],
    current: str,
    *,
    rewound: bool,
    skipped: UndoneRanges | None = None,
) -> tuple[int | None, int, str]:
    """Return the fields of `ReadOfSink`; the batch is an upper bound if all positions that are kept are later.

    Args:
        read: Next offset that the source reads, by partition.
        current: `query_mark` of the writing query.
        skipped: What the source did not read.
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
        # A batch has no record if the next one begins at the same offset.
        ends = [*(each.offset for each in positions[1:]), offset]
        seen = [each for each, end in zip(positions, ends, strict=True) if each.offset < min(offset, end)]
        if not seen:
            before = positions[0].batch - 1
            newest = max(before, -1 if newest is None else newest) if before >= 0 else newest
        parts = (skipped or {}).get(partition, ())
        for each in seen:
            # A later live directory has written this batch once more.
            is_undone = any(other.epoch > each.epoch and other.batch <= each.batch for other in written)
            if any(part.has(each.offset) or (is_undone and each.offset == part.end) for part in parts):
                continue
            if is_undone:
                undone.add((each.epoch, each.batch))
            else:
                newest = max(each.batch, -1 if newest is None else newest)
    if rewound and newest is not None and written[-1].query != current:
        return None, 0, "the stream has written no batch since it went back, and the position is"
    return newest, len(undone), ""
