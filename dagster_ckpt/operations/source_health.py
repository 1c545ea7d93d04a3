"""What the sources of a stream tell: how far behind it is, and how long they keep what a recovery reads again. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from dagster_ckpt.config.durations import iso_duration

# Topic to partition to offset.
Offsets = Mapping[str, Mapping[str, int]]


class SourceKind(Enum):
    """What is known of a source by what Spark calls it."""

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
        name: What Spark calls it, such as `KafkaV2[Subscribe[orders]]`.
        behind: Records that wait in it, or None where it does not tell.
        read_up_to: Kafka offsets up to which the restore point has read, or None.
        earliest: Kafka offsets that the topic still has, or None.
    """

    name: str
    behind: int | None = None
    read_up_to: Offsets | None = None
    earliest: Offsets | None = None

    @property
    def kind(self) -> SourceKind:
        """What it is."""
        return next((kind for begin, kind in _KINDS if self.name.startswith(begin)), SourceKind.OTHER)


@dataclass(frozen=True)
class Retention:
    """Whether a source still has what a recovery reads again.

    Attributes:
        message: In words.
        is_gone: It has not.
        for_ever: It always will.
        left_ms: How long it still has it, or None where nobody can say.
    """

    message: str
    is_gone: bool = False
    for_ever: bool = False
    left_ms: int | None = None


def sources_of(progress: Mapping[str, Any]) -> list[SourceFacts] | None:
    """The sources in the figures that an execution keeps in the catalog; None where it has not reported any."""
    reported = progress.get("sources")
    if not isinstance(reported, list) or not reported:
        return None
    return [
        SourceFacts(str(each.get("source")), each.get("behind"), kafka_offsets(each.get("read_up_to")))
        for each in reported
        if isinstance(each, dict)
    ]


def kafka_offsets(text: object) -> Offsets | None:
    """The offsets of a Kafka source from their JSON, or None where it is not one."""
    try:
        offsets = json.loads(text) if isinstance(text, str) else text
        return {
            str(topic): {str(partition): int(offset) for partition, offset in partitions.items()}
            for topic, partitions in offsets.items()  # type: ignore[union-attr]
        }
    except (AttributeError, TypeError, ValueError):
        return None


def with_earliest(sources: Sequence[SourceFacts], earliest: Offsets) -> list[SourceFacts]:
    """The same sources, the Kafka ones with the offsets that their topics still have."""
    return [replace(each, earliest=earliest) if each.kind is SourceKind.KAFKA else each for each in sources]


def lag(sources: Sequence[SourceFacts] | None) -> int | None:
    """Records that wait in all sources, or None where one of them does not tell."""
    if not sources or any(source.behind is None for source in sources):
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
    """Whether a source still has what a recovery from a restore point reads again.

    Args:
        source: The source.
        restore_point_at_ms: When the snapshot was begun: what came later is read again.
        now_ms: The time now.
        retention_ms: How long the sources keep what they had, or None where that is not known.
        file_max_age_ms: `maxFileAge` of file sources.
    """
    if source.kind is SourceKind.GENERATED:
        return Retention("makes its rows anew", for_ever=True)
    gone = _gone(source)
    if gone is not None:
        return Retention(gone, is_gone=True)
    if retention_ms is None and source.kind is SourceKind.FILES:
        retention_ms = file_max_age_ms
    if retention_ms is None:
        if source.read_up_to is not None and source.earliest is not None:
            return Retention("the topic still has all offsets since the restore point", for_ever=True)
        return Retention("how long it keeps its data is not known: set source_retention_ms")
    left_ms = restore_point_at_ms + retention_ms - now_ms
    if left_ms <= 0:
        return Retention(f"no longer has what came {iso_duration(retention_ms)} ago", is_gone=True, left_ms=0)
    return Retention(f"has what is read again for another {iso_duration(left_ms)}", left_ms=left_ms)


def _gone(source: SourceFacts) -> str | None:
    if source.read_up_to is None or source.earliest is None:
        return None
    for topic, partitions in source.read_up_to.items():
        for partition, offset in partitions.items():
            first = source.earliest.get(topic, {}).get(partition)
            if first is not None and first > offset:
                return f"{topic}-{partition} begins at {first}, and a recovery reads on from {offset}"
    return None
