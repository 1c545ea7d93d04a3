"""What the catalog knows of a query that is about to write to a topic: where its stream wrote before."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dagster_ckpt.catalog.records import ExecutionRecord
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.output import KafkaPlace

# Kafka deletes the markers of a stream without batches after `offsets.retention.minutes`: 7 days by default, and rarely
# less than this.
KEPT_FOR_MS = 6 * 3_600_000
_NAME = re.compile(r"ForeachBatchSink\[(?P<place>kafka://.+)\]")


@dataclass(frozen=True)
class Past:
    """What a claim has to know of earlier starts.

    Attributes:
        places: Other topics and prefixes with which the stream has written since its last batch at this one.
        has_written: Whether the query has written, and its next batch may be one of those: then it has markers.
        may_lack_markers: Whether Kafka may have deleted the markers since the last batch. Only true if the query has
            no planned batch: that one could be in the topic.
    """

    places: tuple[tuple[str, str], ...] = ()
    has_written: bool = False
    may_lack_markers: bool = False


def place_in(sink: str) -> KafkaPlace | None:
    """The place in Spark's name for a transactional sink; None for the name of any other sink."""
    match = _NAME.fullmatch(sink)
    return KafkaPlace.parse(match["place"]) if match else None


def past_of(place: KafkaPlace, executions: Sequence[ExecutionRecord], live: LiveDirectory, *, now_ms: float) -> Past:
    """What the executions of a stream say of a query that is about to start in a live directory.

    Args:
        place: Where it will write.
        executions: The executions of its stream, the newest first.
        live: The live directory.
        now_ms: The time, in milliseconds of the Unix epoch.

    Raises:
        StorageAccessError: It cannot be read.
        LiveDirectoryError: Likewise.
    """
    query_id = live_query_id(live)
    here = (place.topic, place.prefix)
    places: list[tuple[str, str]] = []
    has_moved_here = False
    wrote, wrote_from_here, wrote_at_ms = False, False, 0
    for execution in executions:
        progress = execution.progress or {}
        seen = {(each.topic, each.prefix) for name in progress.get("sinks") or () if (each := place_in(str(name)))}
        has_batch = seen and progress.get("batch_id") is not None
        if not has_moved_here:
            places += [each for each in sorted(seen - {here}) if each not in places]
        # Before its first batch here, that start has claimed the other places.
        has_moved_here |= bool(has_batch) and here in seen
        if has_batch and query_id is not None and progress.get("query_id") == query_id:
            wrote = True
            wrote_at_ms = max(wrote_at_ms, execution.heartbeat_at_ms)
            wrote_from_here |= execution.live_directory == live.url
    positions = live.positions()
    # A batch that this start plans in the directory in which the query stopped is in no topic. One that was planned
    # before may be, and so may one after a snapshot that was restored.
    is_new = wrote_from_here and positions.offset == positions.commit
    is_long_ago = now_ms - wrote_at_ms > KEPT_FOR_MS
    return Past(tuple(places), wrote and not is_new, may_lack_markers=wrote and is_new and is_long_ago)
