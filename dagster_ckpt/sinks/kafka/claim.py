"""The driver's part of the protocol."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest

from dagster_ckpt.catalog.records import ExecutionRecord
from dagster_ckpt.errors import RowsAtRiskError
from dagster_ckpt.sinks.kafka.marker import (
    Marker,
    Transactions,
    begins_of_batches,
    earlier_queries,
    positions_in,
    query_mark,
    refuse_others,
)
from dagster_ckpt.sinks.kafka.transaction import (
    Session,
    await_topic,
    is_fenced,
    kafka_errors,
    marker_at_a_glance,
    unavailable,
)
from dagster_ckpt.sinks.kafka.undone import TopicEnd, as_text, parse, with_undone
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.output import KafkaPlace

# Attempts; of two starts that fence each other, the later live directory wins.
_CLAIMS = 3
# Kafka keeps an idle stream's markers for `offsets.retention.minutes`: 7 days by default, rarely less than this.
KEPT_FOR_MS = 6 * 3_600_000
_SINK_NAME = re.compile(r"ForeachBatchSink\[(?P<place>kafka://.+)\]")
_DELETED = (
    "Kafka deletes the offsets of a group that is unused for offsets.retention.minutes, and those on a topic that is "
    "deleted."
)
_WRITE_AGAIN = "To write these rows a second time, start from a snapshot or batch-<n> with new_query_id."


@dataclass(frozen=True)
class Past:
    """What a claim has to know of earlier starts.

    Attributes:
        places: Topics and prefixes to which the stream has written since its last batch at this one.
        has_written: Whether the query may have written the next batch: then there are markers.
        may_lack_markers: Kafka may have deleted them since the last batch; no planned batch can be in the topic.
        restored: End of the topic at the snapshot after which the query continues, if known.
    """

    places: tuple[tuple[str, str], ...] = ()
    has_written: bool = False
    may_lack_markers: bool = False
    restored: TopicEnd | None = None
    is_new: bool = False


def place_in(sink: str) -> KafkaPlace | None:
    match = _SINK_NAME.fullmatch(sink)
    return KafkaPlace.parse(match["place"]) if match else None


def past_of(place: KafkaPlace, executions: Sequence[ExecutionRecord], live: LiveDirectory, *, now_ms: float) -> Past:
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
        # That start claimed the other places before its first batch here.
        has_moved_here |= bool(has_batch) and here in seen
        if has_batch and query_id is not None and progress.get("query_id") == query_id:
            wrote = True
            wrote_at_ms = max(wrote_at_ms, execution.heartbeat_at_ms)
            wrote_from_here |= execution.live_directory == live.url
    positions = live.positions()
    # A batch that this start plans where the query stopped is in no topic; an earlier planned one, or one after a
    # restored snapshot, may be.
    is_new = wrote_from_here and positions.offset == positions.commit
    is_long_ago = now_ms - wrote_at_ms > KEPT_FOR_MS
    lacks = wrote and is_new and is_long_ago
    return Past(tuple(places), wrote and not is_new, may_lack_markers=lacks, is_new=not wrote)


_NO_PAST = Past()


def claim(target: Transactions, first: int, past: Past = _NO_PAST) -> None:
    """Make this start the owner of every marker, before its first batch.

    A predecessor that still runs at a former topic or prefix is fenced, and its newest batch is not repeated.
    """
    await_topic(target.client, target.topic)
    for attempt in range(1, _CLAIMS + 1):
        try:
            _claim(target, first, past)
        except kafka_errors() as error:
            if attempt == _CLAIMS or not is_fenced(error):
                raise unavailable(target, None, error) from error
        else:
            return


def claim_from_another_query(target: Transactions, first: int, past: Past) -> None:
    """Claim markers that are another query's, before a batch is planned."""
    try:
        marker = marker_at_a_glance(target, 0)
    except kafka_errors() as error:
        raise unavailable(target, None, error) from error
    if marker is not None and marker.query != target.query_id:
        claim(target, first, past)


def _claim(target: Transactions, first: int, past: Past) -> None:
    with ExitStack() as stack:
        here = _fenced(target, stack)
        former = [replace(target, topic=topic, prefix=prefix) for topic, prefix in past.places]
        places = [here, *(_fenced(place, stack, is_former=True) for place in former)]
        every = [marker for place in places for _, marker in place if marker is not None]
        _refuse_a_left_query(target, every)
        found = [_newest(target, held) for held in zip_longest(*places)]
        position = _position(target, found, first, must_exist=past.has_written)
        own = [each for each in every if each.query == target.query_id and each.entry]
        entries = {each.batch: each.entry for each in own} | {first: target.entry}
        earlier = earlier_queries(every, target.query_id)
        undone = _undone(target, here, first, past.restored)
        # The former places come last: until then, an interrupted claim is repeated. The last writer comes first, so
        # that markers of the previous number of writers stay together.
        for place in places:
            for (session, _), marker in reversed([*zip(place, found, strict=False)]):
                if session is None:
                    continue
                batch = position if position is not None else marker.batch if marker is not None else first - 1
                session.earlier = earlier
                session.commit(batch, entries.get(batch, ""), undone=undone if place is here else None)


_Held = list[tuple[Session | None, Marker | None]]


def _undone(target: Transactions, here: _Held, first: int, restored: TopicEnd | None) -> dict[int, str] | None:
    """Return what a query that begins to write here undoes; None if it has begun, or is the first one.

    All earlier writers are fenced, so the topic gets no more of their records.
    """
    known = [(session, marker) for session, marker in here if session is not None and marker is not None]
    left = [marker for _, marker in known if marker.query != target.query_id]
    if not left:
        return None
    newest = max(left, key=lambda marker: (marker.epoch, marker.batch))
    of_writers = [session.positions for session, _ in known]
    was_undone = max(known, key=lambda each: each[1].epoch)[0].undone
    undone: dict[int, str] = {}
    for partition, end in known[0][0].ends().items():
        begin: int | None
        if restored is not None:
            begin = restored.ends.get(partition, 0)
        elif newest.batch < first:
            begin = end
        else:
            begins = begins_of_batches(positions_in(each.get(partition, "")) for each in of_writers)
            mark = query_mark(newest.query)
            begin = next((each.offset for each in reversed(begins) if (each.batch, each.query) == (first, mark)), None)
        before = restored.undone.get(partition, ()) if restored is not None else parse(was_undone.get(partition, ""))
        undone[partition] = as_text(with_undone(before, begin, end))
    return undone


def _fenced(target: Transactions, stack: ExitStack, *, is_former: bool = False) -> _Held:
    """Fence writers; in a former place, only those with a marker of this stream."""
    held: _Held = []
    writers = target.writers
    while len(held) < writers:
        writer = len(held)
        # Look before a producer is opened: a replaced process must not disturb its successor.
        marker = marker_at_a_glance(target, writer)
        if is_former and (marker is None or marker.is_anothers(target)):
            held.append((None, None))
            continue
        refuse_others(target, writer, marker)
        session = Session(target, writer)
        stack.callback(session.close)
        session.begin_epoch()
        marker = session.marker()
        refuse_others(target, writer, marker)
        held.append((session, marker))
        # Earlier runs may have had more writers.
        writers = max(writers, marker.writers if marker is not None else 0)
    return held


def _newest(target: Transactions, held: Sequence[tuple[Session | None, Marker | None] | None]) -> Marker | None:
    markers = [each[1] for each in held if each is not None and each[1] is not None]
    return max(markers, key=lambda marker: (marker.query == target.query_id, marker.batch), default=None)


def _refuse_a_left_query(target: Transactions, markers: Sequence[Marker]) -> None:
    """Refuse a query whose successor may have written the same rows."""
    for marker in markers:
        last = marker.earlier.get(target.query_id)
        if last is not None:
            raise RowsAtRiskError(
                f"Topic {target.topic} has batches up to {last} of query {target.query_id}, and then some of query "
                f"{marker.query}, which has replaced it. The former is about to continue, and would write rows again. "
                f"Nothing was written. {_WRITE_AGAIN}"
            )


def _position(
    target: Transactions, found: Sequence[Marker | None], first: int, *, must_exist: bool = False
) -> int | None:
    """Return the batch for all markers; None leaves each as it is, because only some have the batch in flight."""
    known = {
        writer: marker for writer, marker in enumerate(found) if marker is not None and marker.query == target.query_id
    }
    if must_exist:
        # A claim changes marker 0 last: an interrupted one leaves the former number of writers.
        counted = [known[0]] if 0 in known else known.values()
        writers = max((marker.writers for marker in counted), default=target.writers)
        lost = sorted({*range(writers)} - {*known})
        if lost:
            raise RowsAtRiskError(
                f"Query {target.query_id} has written to topic {target.topic}, and the markers of its writers {lost} "
                f"(consumer groups {', '.join(map(target.id_of, lost[:3]))}{', ...' if len(lost) > 3 else ''}) are "
                f"missing, so it is unknown whether the topic has batch {first}. Nothing was written. {_DELETED} "
                f"Compare the topic with the rows of the batch. {_WRITE_AGAIN}"
            )
    ahead = max((marker.batch for marker in known.values()), default=-1)
    if ahead > first:
        raise RowsAtRiskError(
            f"Topic {target.topic} has batches up to {ahead} of query {target.query_id}, and the query is about to "
            f"write batch {first}: the query was rewound, but a topic cannot be. Nothing was written. {_WRITE_AGAIN}"
        )
    if ahead < first:
        return first - 1
    done = [writer for writer, marker in known.items() if marker.batch == first]
    if any(known[writer].entry != target.entry for writer in done):
        raise RowsAtRiskError(
            f"The markers of topic {target.topic} are at batch {first} of query {target.query_id}, but that batch was "
            "planned differently from the one that the query is about to write, and may have other rows. Nothing was "
            f"written. Compare the topic with the rows of the batch. {_WRITE_AGAIN}"
        )
    # After an interrupted claim with another number of writers, all of either number have the batch.
    writers = min(known[writer].writers for writer in done)
    if {*range(writers)} <= {*done}:
        return first
    missing = sorted({*range(writers)} - {*done})
    if writers == target.writers and all(writer in known for writer in missing):
        return None
    raise RowsAtRiskError(
        f"Writers {done} of topic {target.topic} have written their share of batch {first}, but it is unknown whether "
        f"writers {missing} can still write theirs. Nothing was written. "
        + (
            f"The stream ran with {writers} writers: start it once with the same number, as {target.writers} would "
            "divide the rows differently."
            if writers != target.writers
            else f"{_DELETED} Compare the topic with the rows of the batch. {_WRITE_AGAIN}"
        )
    )
