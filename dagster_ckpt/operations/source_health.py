"""What a stream's sources report: the backlog, and how long they retain what a recovery would re-read. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from dagster_ckpt.config.durations import iso_duration, utc_time

# Topic to partition to offset.
Offsets = Mapping[str, Mapping[str, int]]


class SourceKind(Enum):
    """Kind of a source, derived from Spark's name for it."""

    KAFKA = "KAFKA"
    FILES = "FILES"
    GENERATED = "GENERATED"
    OTHER = "OTHER"


_KINDS = (
    ("Kafka", SourceKind.KAFKA),
    ("FileStreamSource", SourceKind.FILES),
    ("Rate", SourceKind.GENERATED),
)


@dataclass(frozen=True)
class SourceFacts:
    """One source of a stream.

    Attributes:
        name: Spark's name for it, such as `KafkaV2[Subscribe[orders]]`.
        behind: Records waiting in it, or None if it does not report them.
        read_up_to: Kafka offsets up to which the restore point has read, or None.
        earliest: Earliest Kafka offsets that the topic still has, or None.
    """

    name: str
    behind: int | None = None
    read_up_to: Offsets | None = None
    earliest: Offsets | None = None

    @property
    def kind(self) -> SourceKind:
        """Its kind."""
        return next((kind for begin, kind in _KINDS if self.name.startswith(begin)), SourceKind.OTHER)


@dataclass(frozen=True)
class Retention:
    """Whether a source still retains what a recovery would re-read.

    Attributes:
        message: The answer in words.
        is_gone: The data is no longer there.
        is_unlimited: The data will always be there.
        left_ms: How long the data remains, or None if unknown.
    """

    message: str
    is_gone: bool = False
    is_unlimited: bool = False
    left_ms: int | None = None


def sources_of(progress: Mapping[str, Any]) -> list[SourceFacts] | None:
    """The sources in an execution's progress in the catalog; None if it has not reported any."""
    reported = progress.get("sources")
    if not isinstance(reported, list) or not reported:
        return None
    return [
        SourceFacts(str(each.get("source")), each.get("behind"), kafka_offsets(each.get("read_up_to")))
        for each in reported
        if isinstance(each, dict)
    ]


def kafka_offsets(text: object) -> Offsets | None:
    """Parse the offsets of a Kafka source from JSON; None for other sources."""
    try:
        offsets = json.loads(text) if isinstance(text, str) else text
        return {
            str(topic): {str(partition): int(offset) for partition, offset in partitions.items()}
            for topic, partitions in offsets.items()  # type: ignore[union-attr]
        }
    except (AttributeError, TypeError, ValueError):
        return None


def with_earliest(sources: Sequence[SourceFacts], earliest: Offsets) -> list[SourceFacts]:
    """The same sources, with the earliest offsets of their topics added to Kafka sources."""
    return [replace(each, earliest=earliest) if each.kind is SourceKind.KAFKA else each for each in sources]


def reporting_lag(sources: Sequence[SourceFacts]) -> list[SourceFacts]:
    """The sources without those that never report a backlog: files, and generated rows."""
    silent = (SourceKind.FILES, SourceKind.GENERATED)
    return [source for source in sources if source.behind is not None or source.kind not in silent]


def lag(sources: Sequence[SourceFacts]) -> int | None:
    """Records waiting in all sources, or None if one of them does not report it."""
    if any(source.behind is None for source in sources):
        return None
    return sum(source.behind or 0 for source in sources)


def retention(
    source: SourceFacts,
    *,
    restore_point_at_ms: int,
    now_ms: int,
    retention_ms: int | None,
    file_max_age_ms: int,
) -> Retention:
    """Whether a source still retains what a recovery from a restore point would re-read.

    Args:
        source: The source.
        restore_point_at_ms: When the snapshot was begun: later data is read again.
        now_ms: The current time.
        retention_ms: How long the sources retain data, or None if unknown.
        file_max_age_ms: `maxFileAge` of file sources.
    """
    if source.kind is SourceKind.GENERATED:
        return Retention("generates its rows again", is_unlimited=True)
    gone = _gone(source)
    if gone is not None:
        return Retention(gone, is_gone=True)
    if retention_ms is None and source.kind is SourceKind.FILES:
        retention_ms = file_max_age_ms
    if retention_ms is None:
        if source.read_up_to is not None and source.earliest is not None:
            return Retention("still has all offsets since the restore point", is_unlimited=True)
        return Retention("its retention is unknown: set source_retention_ms")
    until_ms = restore_point_at_ms + retention_ms
    if until_ms <= now_ms:
        message = (
            f"no longer has every record since the restore point: it retains them for {iso_duration(retention_ms)}"
        )
        return Retention(message, is_gone=True, left_ms=0)
    return Retention(
        f"retains the records since the restore point until {utc_time(until_ms)}", left_ms=until_ms - now_ms
    )


def _gone(source: SourceFacts) -> str | None:
    if source.read_up_to is None or source.earliest is None:
        return None
    for topic, partitions in source.read_up_to.items():
        for partition, offset in partitions.items():
            first = source.earliest.get(topic, {}).get(partition)
            if first is not None and first > offset:
                return f"{topic}-{partition} begins at {first}, and a recovery reads on from {offset}"
    return None
