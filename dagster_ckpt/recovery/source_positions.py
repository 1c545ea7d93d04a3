"""Positions of Kafka sources in the offset log, and a live directory whose sources continue elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from dagster_ckpt.errors import OptionError, RestoreError
from dagster_ckpt.spark.checkpoint_dir.layout import OFFSETS, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry, with_offsets
from dagster_ckpt.spark.query.kafka_source import TopicOffsets
from dagster_ckpt.stream.source_offsets import SourceOffsets
from dagster_ckpt.values.untrusted import from_json


def topic_offsets(text: str | None) -> TopicOffsets | None:
    """Parse the offset of a source; None if it is not one of Kafka."""
    try:
        return {
            str(topic): {str(partition): int(offset) for partition, offset in partitions.items()}
            for topic, partitions in from_json(text or "").items()
        }
    except (AttributeError, TypeError, ValueError):
        return None


def check_known(chosen: SourceOffsets, positions: Mapping[str, TopicOffsets]) -> None:
    """Refuse topics and partitions that the query does not read.

    Args:
        chosen: The chosen positions.
        positions: The position of each Kafka source, by its name.

    Raises:
        OptionError: It does not read one of them.
    """
    known = {(topic, each) for position in positions.values() for topic, read in position.items() for each in read}
    topics = sorted({topic for topic, _ in known})
    for topic in (*chosen.partitions, *chosen.times):
        if topic not in topics:
            raise OptionError(
                f"source_offsets names topic {topic!r}, but the query reads {', '.join(topics) or 'no topic'}."
            )
    for topic, partitions in chosen.partitions.items():
        for partition in partitions:
            if (topic, partition) not in known:
                mine = ", ".join(sorted(each for of, each in known if of == topic))
                raise OptionError(
                    f"source_offsets names partition {partition} of topic {topic!r}, but the query reads {mine}."
                )


def move_sources(live: LiveDirectory, chosen: SourceOffsets) -> None:
    """Let the next batch of a new live directory, which is not in use yet, begin at chosen offsets.

    Args:
        live: The directory.
        chosen: The positions; times are resolved.

    Raises:
        RestoreError: No batch is committed there.
        OptionError: The query does not read a topic or a partition.
        StorageAccessError: It cannot be written.
    """
    batch_id = live.positions().commit
    if batch_id is None:
        raise RestoreError(f"{live.url} has no committed batch, so its sources have no position to change.")
    path = f"{OFFSETS}/{batch_id}"
    data = live.folder.read(path)
    entry = parse_offset_entry(data, f"{live.url}/{path}")
    positions = {name: found for name, text in entry.sources.items() if (found := topic_offsets(text)) is not None}
    check_known(chosen, positions)
    # The batch in flight was planned from the old position.
    live.folder.delete(f"{OFFSETS}/{batch_id + 1}")
    live.folder.flush(OFFSETS)
    live.folder.write(path, [with_offsets(data, f"{live.url}/{path}", moved(positions, chosen))])


def moved(positions: Mapping[str, TopicOffsets], chosen: SourceOffsets) -> dict[str, dict[str, dict[str, int]]]:
    """The positions of the sources that change, by name."""
    changed = {}
    for name, position in positions.items():
        after = {
            topic: {partition: chosen.partitions.get(topic, {}).get(partition, at) for partition, at in known.items()}
            for topic, known in position.items()
        }
        if after != position:
            changed[name] = after
    return changed
