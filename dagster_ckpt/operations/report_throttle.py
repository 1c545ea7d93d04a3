"""Selects which of a stream's events are reported to the orchestrator, so that its event log is not flooded. Pure.

An orchestrator keeps reported events forever, and the catalog keeps every snapshot anyway.
Therefore only the first periodic checkpoint per interval is reported. Intervals follow the clock
and are not counted from the last report: whether an event is reported depends only on it and on the
preceding events of its stream, so reading the events again, from any position, gives the same
answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dagster_ckpt.catalog.records import EventRecord, EventType, SnapshotRecord, SnapshotTrigger

_FAILED = (EventType.CHECKPOINT_FAILED, EventType.SAVEPOINT_FAILED)
# Events that influence whether the next one is reported.
DECISIVE = (
    EventType.CHECKPOINT_COMPLETED,
    EventType.CHECKPOINT_FAILED,
    EventType.EXECUTION_STARTED,
    EventType.EXECUTION_ENDED,
    EventType.RESTORED,
    EventType.SAVEPOINT_COMPLETED,
)
# Number of them that are considered. One more is remembered, because the last checkpoint is judged
# again when its execution ends.
_LOOKED_AT = 3
REMEMBERED = _LOOKED_AT + 1


@dataclass(frozen=True)
class ReportedEvent:
    """An event that is reported.

    Attributes:
        event: The event, of a snapshot or of a failed attempt.
        is_failure: Whether it is a failed attempt.
    """

    event: EventRecord
    is_failure: bool = False


def events_to_report(
    events: Iterable[EventRecord],
    before: Mapping[str, Sequence[EventRecord]],
    snapshots: Mapping[str, SnapshotRecord],
    *,
    interval_ms: int,
) -> Iterator[ReportedEvent]:
    """The events to report, in order.

    Always: savepoints, user-triggered checkpoints, the first checkpoint after a start or a restore,
    the last one before an end, and failed savepoints. Otherwise the first checkpoint per interval,
    and of failed checkpoints the first after a success, then one per interval.

    Args:
        events: New events, in order, of any number of streams.
        before: For each stream its last `REMEMBERED` decisive events before them, oldest first.
        snapshots: The snapshots that the events name, by id; the event of a missing one is reported.
        interval_ms: Length of an interval; 0 reports every event.
    """
    past = {stream_id: list(known) for stream_id, known in before.items()}
    for event in events:
        known = past.setdefault(event.stream_id, [])
        reported = _reported(event, known, snapshots, interval_ms)
        if reported is not None:
            yield reported
        if event.type in DECISIVE:
            past[event.stream_id] = [*known, event][-REMEMBERED:]


def _reported(
    event: EventRecord, known: Sequence[EventRecord], snapshots: Mapping[str, SnapshotRecord], interval_ms: int
) -> ReportedEvent | None:
    if event.type is EventType.EXECUTION_ENDED:
        return _last_unreported(known, snapshots, interval_ms)
    if event.type in _FAILED:
        is_reported = event.type is EventType.SAVEPOINT_FAILED or _is_first(event, known, interval_ms)
        return ReportedEvent(event, is_failure=True) if is_reported else None
    if event.type is EventType.CHECKPOINT_COMPLETED:
        is_reported = _is_first(event, known, interval_ms) or _was_asked_for(event, snapshots)
        return ReportedEvent(event) if is_reported else None
    return ReportedEvent(event) if event.type is EventType.SAVEPOINT_COMPLETED else None


def _last_unreported(
    known: Sequence[EventRecord], snapshots: Mapping[str, SnapshotRecord], interval_ms: int
) -> ReportedEvent | None:
    """The last snapshot of an ending execution, if it is a checkpoint that was not reported."""
    at = next((at for at in reversed(range(len(known))) if known[at].type not in _FAILED), None)
    if at is None or known[at].type is not EventType.CHECKPOINT_COMPLETED:
        return None
    last = known[at]
    is_reported = _is_first(last, known[:at], interval_ms) or _was_asked_for(last, snapshots)
    return None if is_reported else ReportedEvent(last)


def _is_first(event: EventRecord, known: Sequence[EventRecord], interval_ms: int) -> bool:
    """Whether no event of its kind came before it in its interval and its execution."""
    previous = next((each for each in reversed(known[-_LOOKED_AT:]) if _decides(each, event)), None)
    if previous is None or previous.type is not event.type or not interval_ms:
        return True
    return previous.at_ms // interval_ms < event.at_ms // interval_ms


def _decides(previous: EventRecord, event: EventRecord) -> bool:
    # A failure or a savepoint between two checkpoints does not make the second one reportable; a
    # checkpoint between two failures does.
    if event.type in _FAILED:
        return True
    return previous.type not in (*_FAILED, EventType.SAVEPOINT_COMPLETED)


def _was_asked_for(event: EventRecord, snapshots: Mapping[str, SnapshotRecord]) -> bool:
    snapshot = snapshots.get(event.snapshot_id or "")
    return snapshot is None or snapshot.trigger is not SnapshotTrigger.PERIODIC
