"""What the catalog sensor reports on an asset: which events, and each as a materialization or an observation.

Dagster keeps reported events forever, so only the first periodic checkpoint per interval is reported. Intervals follow
the clock, so reading the events again, from any position, gives the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import dagster as dg

from dagster_ckpt.catalog.history import SnapshotTally
from dagster_ckpt.catalog.records import EventRecord, EventType, SnapshotRecord, SnapshotTrigger
from dagster_ckpt.errors import OptionError

SEQUENCE_KEY = "dagster_ckpt/sequence"
SNAPSHOT_ID_KEY = "dagster_ckpt/snapshot_id"
BATCH_ID_KEY = "dagster_ckpt/batch_id"
STREAM_ID_KEY = "dagster_ckpt/stream_id"
# Kafka partitions whose lag a report plots.
PLOTTED_PARTITIONS = 16
TIMELINE_KEY = "dagster_ckpt/timeline"
PAGE_KEY = "dagster_ckpt/checkpoint_page"


@dataclass(frozen=True)
class CheckpointPage:
    """Links to the page of `dagster-ckpt ui`, by its address in users' browsers."""

    url: str

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise OptionError(f"checkpoint_page is {self.url!r}, but must be an address such as http://localhost:3080.")

    def of_stream(self, stream_id: str) -> dg.UrlMetadataValue:
        """The overview of a stream."""
        return dg.MetadataValue.url(f"{self.url.rstrip('/')}/streams/{quote(stream_id)}")

    def of_snapshot(self, stream_id: str, snapshot_id: str) -> dg.UrlMetadataValue:
        """One snapshot of a stream."""
        return dg.MetadataValue.url(f"{self.of_stream(stream_id).url}/-/snapshots/{quote(snapshot_id)}")


def identity(event: EventRecord) -> str:
    """Identify an event, even in a re-created catalog, which counts from one again."""
    return event.snapshot_id or f"event {event.sequence}"


def materialization(
    key: dg.AssetKey,
    event: EventRecord,
    snapshot: SnapshotRecord | None,
    tally: SnapshotTally | None,
    page: CheckpointPage | None = None,
) -> dg.AssetMaterialization:
    """A snapshot as a materialization of its asset.

    `snapshot` None: its row cannot be read. `tally`: the checkpoints since the previous report, including this one.
    """
    metadata = snapshot_metadata(snapshot) if snapshot is not None else dict(event.payload)
    batch_id = metadata.get(BATCH_ID_KEY, "unknown")
    since = (
        {}
        if tally is None
        else {
            "dagster_ckpt/checkpoints_since_report": tally.count,
            "dagster_ckpt/rows_since_report": tally.rows,
            "dagster_ckpt/bytes_since_report": tally.incremental_bytes,
        }
    )
    if page is not None and event.snapshot_id is not None:
        metadata[PAGE_KEY] = page.of_snapshot(event.stream_id, event.snapshot_id)
    return dg.AssetMaterialization(
        key,
        description=f"{metadata.get('dagster_ckpt/kind', event.type.value)} at batch {batch_id}",
        metadata={SEQUENCE_KEY: event.sequence, SNAPSHOT_ID_KEY: identity(event), **metadata, **since},
        tags={"dagster/data_version": str(batch_id)},
    )


def failure_observation(key: dg.AssetKey, event: EventRecord) -> dg.AssetObservation:
    """Report a failed attempt: nothing was materialized."""
    kind = "savepoint" if event.type is EventType.SAVEPOINT_FAILED else "checkpoint"
    return dg.AssetObservation(
        key,
        description=f"a {kind} failed",
        metadata={
            SEQUENCE_KEY: event.sequence,
            SNAPSHOT_ID_KEY: identity(event),
            "dagster_ckpt/failure": str(event.payload.get("reason", "unknown")),
        },
    )


def snapshot_metadata(snapshot: SnapshotRecord) -> dict[str, Any]:
    """The figures of a snapshot; the asset's page plots numbers."""
    figures: dict[str, Any] = {
        BATCH_ID_KEY: snapshot.batch_id,
        STREAM_ID_KEY: snapshot.stream_id,
        TIMELINE_KEY: snapshot.timeline,
        "dagster_ckpt/rows": snapshot.rows,
        "dagster_ckpt/state_rows": snapshot.state_rows,
        "dagster_ckpt/duration_ms": snapshot.duration_ms,
        "dagster_ckpt/full_bytes": snapshot.full_bytes,
        "dagster_ckpt/incremental_bytes": snapshot.incremental_bytes,
        "dagster_ckpt/number": snapshot.number,
        "dagster_ckpt/kind": snapshot.kind.value,
        "dagster_ckpt/trigger": snapshot.trigger.value,
        "dagster_ckpt/location": dg.MetadataValue.path(snapshot.location or ""),
        SNAPSHOT_ID_KEY: snapshot.snapshot_id,
        "dagster_ckpt/watermark": snapshot.watermark,
    }
    if lags := snapshot.lags:
        figures["dagster_ckpt/records_behind"] = sum(lags.values())
        # Those furthest behind, of thousands.
        worst = sorted(lags, key=lambda name: (-lags[name], name))[:PLOTTED_PARTITIONS]
        figures |= {f"dagster_ckpt/records_behind/{name}": lags[name] for name in sorted(worst)}
    watermark_ms = snapshot.watermark_ms
    if watermark_ms is not None:
        figures["dagster_ckpt/watermark_time"] = dg.MetadataValue.timestamp(watermark_ms / 1000)
        # The page plots only integers and floats, not timestamps.
        figures["dagster_ckpt/watermark_ms"] = watermark_ms
    return {name: value for name, value in figures.items() if value is not None}


_FAILED = (EventType.CHECKPOINT_FAILED, EventType.SAVEPOINT_FAILED)
# Events that decide whether the next one is reported.
DECISIVE = (
    EventType.CHECKPOINT_COMPLETED,
    EventType.CHECKPOINT_FAILED,
    EventType.EXECUTION_STARTED,
    EventType.EXECUTION_ENDED,
    EventType.RESTORED,
    EventType.SAVEPOINT_COMPLETED,
)
# One more is remembered: the end of an execution judges its last checkpoint again.
_CONSIDERED = 3
REMEMBERED = _CONSIDERED + 1


@dataclass(frozen=True)
class ReportedEvent:
    """A reported event, of a snapshot or a failed attempt."""

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

    Always: savepoints, user-triggered checkpoints, the first checkpoint after a start or restore, the last before an
    end, and failed savepoints. Else the first checkpoint per interval, and of failed ones the first after a success,
    then one per interval.

    Args:
        events: New ones, in order, of any streams.
        before: For each stream, `REMEMBERED` decisive events, oldest first.
        snapshots: By id; the event of a missing one is reported.
        interval_ms: 0 reports every event.
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
    """The last snapshot of an ending execution, if it is a checkpoint."""
    at = next((at for at in reversed(range(len(known))) if known[at].type not in _FAILED), None)
    if at is None or known[at].type is not EventType.CHECKPOINT_COMPLETED:
        return None
    last = known[at]
    is_reported = _is_first(last, known[:at], interval_ms) or _was_asked_for(last, snapshots)
    return None if is_reported else ReportedEvent(last)


def _is_first(event: EventRecord, known: Sequence[EventRecord], interval_ms: int) -> bool:
    """Whether it is the first of its kind in its interval and execution."""
    previous = next((each for each in reversed(known[-_CONSIDERED:]) if _decides(each, event)), None)
    if previous is None or previous.type is not event.type or not interval_ms:
        return True
    return previous.at_ms // interval_ms < event.at_ms // interval_ms


def _decides(previous: EventRecord, event: EventRecord) -> bool:
    # A checkpoint between two failures makes the second reportable; a failure or savepoint between checkpoints does
    # not.
    if event.type in _FAILED:
        return True
    return previous.type not in (*_FAILED, EventType.SAVEPOINT_COMPLETED)


def _was_asked_for(event: EventRecord, snapshots: Mapping[str, SnapshotRecord]) -> bool:
    snapshot = snapshots.get(event.snapshot_id or "")
    return snapshot is None or snapshot.trigger is not SnapshotTrigger.PERIODIC
