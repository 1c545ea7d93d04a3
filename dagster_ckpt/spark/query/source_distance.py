"""Amount of input between two batches, as far as the offsets of the sources show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.spark.checkpoint_dir.file_source import files_after, log_offset
from dagster_ckpt.spark.checkpoint_dir.layout import OFFSETS, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry
from dagster_ckpt.spark.query.delta_source import delta_offset
from dagster_ckpt.values.untrusted import from_json, reading


@dataclass(frozen=True)
class SourceDistance:
    """The input that is read again from one source.

    Attributes:
        source: Name of the source, or its number in the query.
        kind: "files", "Kafka records", "table versions", "rows", or "unknown" if its offsets are not counts.
        count: The number; None for an unknown kind.
    """

    source: str
    kind: str
    count: int | None

    @property
    def rows(self) -> int | None:
        """Number of rows, if rows were counted."""
        return self.count if self.kind in ("Kafka records", "rows") else None


@dataclass(frozen=True)
class Distance:
    """The distance between two batches.

    Attributes:
        sources: The input that is read again, by source.
        span_ms: Processing time between the planning of the two batches.
        earlier_at_ms: When the earlier one was planned, ms since the epoch; 0 if its entry does not
            contain it.
    """

    sources: tuple[SourceDistance, ...]
    span_ms: int
    earlier_at_ms: int = 0


def distance(live: LiveDirectory, earlier: bytes | None, from_batch: int, to_batch: int) -> Distance | None:
    """The distance between two planned batches of a live directory.

    Args:
        live: The live directory; its query may be running.
        earlier: The offset log entry of the earlier batch, from a snapshot; None reads that of the
            directory.
        from_batch: The later batch.
        to_batch: The earlier batch.

    Returns:
        None if one of the two entries is missing or cannot be parsed.

    Raises:
        StorageAccessError: The directory cannot be reached.
    """
    unreadable = f"{live.url} does not record what is between batch {to_batch} and batch {from_batch}"
    try:
        with reading(lambda why: LiveDirectoryError(f"{unreadable}: {why}.")):
            return _distance(live, earlier, from_batch, to_batch)
    except (FileNotFoundError, LiveDirectoryError):
        return None


def _distance(live: LiveDirectory, earlier: bytes | None, from_batch: int, to_batch: int) -> Distance:
    data = live.folder.read(f"{OFFSETS}/{to_batch}") if earlier is None else earlier
    newer = live.folder.read(f"{OFFSETS}/{from_batch}")
    before = parse_offset_entry(data, f"{OFFSETS}/{to_batch}")
    after = parse_offset_entry(newer, f"{OFFSETS}/{from_batch}")
    sources = [_between(live.folder, name, before.sources.get(name), offset) for name, offset in after.sources.items()]
    return Distance(tuple(sources), _planned_at_ms(newer) - _planned_at_ms(data), _planned_at_ms(data))


def _between(folder: FileIO, source: str, before: str | None, after: str | None) -> SourceDistance:
    if after is None or after == before:
        return SourceDistance(source, "rows", 0)
    last = log_offset(after)
    if last is not None:
        first = log_offset(before)
        return SourceDistance(source, "files", _files(folder, source, -1 if first is None else first, last))
    records = _kafka_records(_json(before) if before else {}, _json(after)) if before else None
    if records is not None:
        return SourceDistance(source, "Kafka records", records)
    delta = delta_offset(after)
    if delta is not None:
        earlier = delta_offset(before)
        return SourceDistance(source, "table versions", delta.version - (earlier.version if earlier else 0))
    old, new = _json(before) if before else {"offset": 0}, _json(after)
    if isinstance(old, dict) and isinstance(new, dict) and new.keys() == {"offset", "timestamp"}:
        # RatePerMicroBatchStreamOffset counts rows.
        return SourceDistance(source, "rows", int(new["offset"]) - int(old["offset"]))
    return SourceDistance(source, "unknown", None)


def _files(folder: FileIO, source: str, first: int, last: int) -> int:
    return sum(1 for each in files_after(folder, source, first) if each.position <= last)


def _kafka_records(before: Any, after: Any) -> int | None:
    """Number of records between two `KafkaSourceOffset`s (topic to partition to offset)."""
    total = 0
    try:
        for topic, partitions in after.items():
            for partition, offset in partitions.items():
                total += int(offset) - int(before.get(topic, {}).get(partition, 0))
    except (AttributeError, TypeError, ValueError):
        return None
    return total


def _planned_at_ms(data: bytes) -> int:
    line = data.decode("utf-8", "replace").split("\n")[1]
    metadata = from_json(line) if line.strip() else {}
    return int(metadata.get("batchTimestampMs") or 0)


def _json(text: str) -> Any:
    try:
        return from_json(text)
    except ValueError:
        return None
