"""The catalog sensor.

Dagster keeps reported events forever, so of periodic checkpoints only the first per interval is reported. Intervals
follow the clock, so reading the events again gives the same answer.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import dagster as dg

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.history import SnapshotTally
from dagster_ckpt.catalog.records import EventRecord, EventType, SnapshotRecord, SnapshotTrigger
from dagster_ckpt.orchestration._compat import UnresolvedAssetJobDefinition
from dagster_ckpt.orchestration.metadata import (
    DEPLOYMENT_KEY,
    SEQUENCE_KEY,
    SNAPSHOT_ID_KEY,
    CheckpointPage,
    OtherDeployments,
    failure_observation,
    identity,
    materialization,
    number_in,
)
from dagster_ckpt.orchestration.resources import catalog_of
from dagster_ckpt.orchestration.run_status import UNFINISHED
from dagster_ckpt.orchestration.stream import Stream, translator_of
from dagster_ckpt.orchestration.translator import CHECKPOINT_CATALOG
from dagster_ckpt.values.durations import wall_clock_ms

_FAILED = (EventType.CHECKPOINT_FAILED, EventType.SAVEPOINT_FAILED)
# Events that decide whether a later one is reported.
DECISIVE = (
    EventType.CHECKPOINT_COMPLETED,
    EventType.CHECKPOINT_FAILED,
    EventType.EXECUTION_STARTED,
    EventType.EXECUTION_ENDED,
    EventType.RESTORED,
    EventType.SAVEPOINT_COMPLETED,
)
# One more, because the end of an execution judges its last checkpoint again.
_CONSIDERED = 3
REMEMBERED = _CONSIDERED + 1


@dataclass(frozen=True)
class ReportedEvent:
    event: EventRecord
    is_failure: bool = False


def events_to_report(
    events: Iterable[EventRecord],
    before: Mapping[str, Sequence[EventRecord]],
    snapshots: Mapping[str, SnapshotRecord],
    *,
    interval_ms: int,
) -> Iterator[ReportedEvent]:
    """Select the events to report, in order.

    Always reported: savepoints, user-triggered checkpoints, the first checkpoint after a start or restore, the last
    before an end, and failed savepoints. Otherwise the first checkpoint per interval, and of failed ones the first
    after a success, then one per interval.

    Args:
        events: New events of any streams, in order.
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
    at = next((at for at in reversed(range(len(known))) if known[at].type not in _FAILED), None)
    if at is None or known[at].type is not EventType.CHECKPOINT_COMPLETED:
        return None
    last = known[at]
    is_reported = _is_first(last, known[:at], interval_ms) or _was_asked_for(last, snapshots)
    return None if is_reported else ReportedEvent(last)


def _is_first(event: EventRecord, known: Sequence[EventRecord], interval_ms: int) -> bool:
    """Whether an event is the first of its type in its interval and execution."""
    previous = next((each for each in reversed(known[-_CONSIDERED:]) if _decides(each, event)), None)
    if previous is None or previous.type is not event.type or not interval_ms:
        return True
    return previous.at_ms // interval_ms < event.at_ms // interval_ms


def _decides(previous: EventRecord, event: EventRecord) -> bool:
    # A checkpoint between failures makes the next one reportable; between checkpoints, failures and savepoints do not.
    if event.type in _FAILED:
        return True
    return previous.type not in (*_FAILED, EventType.SAVEPOINT_COMPLETED)


def _was_asked_for(event: EventRecord, snapshots: Mapping[str, SnapshotRecord]) -> bool:
    snapshot = snapshots.get(event.snapshot_id or "")
    return snapshot is None or snapshot.trigger is not SnapshotTrigger.PERIODIC


@dataclass(frozen=True)
class Reported:
    """What this process knows of the reports that Dagster has stored.

    Attributes:
        looked_up_to: Later events are on no asset.
        latest: Newest sequence on each asset examined so far.
    """

    looked_up_to: int
    latest: Mapping[dg.AssetKey, int] = field(default_factory=dict)


COMPLETED = (EventType.CHECKPOINT_COMPLETED, EventType.SAVEPOINT_COMPLETED)
# A tick must end well within 60 s; the next one continues.
EVENTS_PER_TICK = 200
# A process first reads each asset's reports, half a millisecond each.
EVENTS_IN_FIRST_TICK = 50
PAGE = 100
# Clocks of catalog and Dagster may differ by this much.
CLOCK_SKEW_S = 24 * 3600.0
REPORT_INTERVAL_S = 60

Report = dg.AssetMaterialization | dg.AssetObservation


@dataclass(frozen=True)
class SensorCursor:
    """`downstream_due`: the downstream job must still be started. `tick`: id of the tick that reached `sequence`."""

    sequence: int = 0
    downstream_due: bool = False
    downstream_at_ms: int = 0
    tick: str = ""

    @staticmethod
    def parse(text: str | None) -> SensorCursor:
        return SensorCursor(**json.loads(text)) if text else SensorCursor()

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def build_catalog_sensor(
    streams: Sequence[Stream],
    *,
    downstream: UnresolvedAssetJobDefinition | dg.JobDefinition | None = None,
    downstream_interval_seconds: int = 0,
    report_interval_seconds: int = REPORT_INTERVAL_S,
    checkpoint_page: str | None = None,
) -> dg.SensorDefinition:
    """Define a sensor that reports completed checkpoints and savepoints on their streaming assets, each at most once.

    Dagster stores a tick's events before the cursor: after a death in between, the next tick skips what is on the
    asset. The arguments are those of `stream_definitions`.
    """
    keys: dict[str, Sequence[dg.AssetKey]] = {stream.stream_id: stream.keys for stream in streams}
    # By the id of the last tick of this process.
    memory: dict[str, Reported] = {}
    others = OtherDeployments()
    page = CheckpointPage(checkpoint_page) if checkpoint_page is not None else None
    translator = translator_of(streams)
    catalog_key = translator.get_resource_key(CHECKPOINT_CATALOG)

    @dg.sensor(
        name=translator.get_sensor_name("checkpoint_catalog_sensor"),
        required_resource_keys={catalog_key},
        jobs=[downstream] if downstream is not None else None,
        minimum_interval_seconds=5,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Reports completed checkpoints and savepoints on their streaming assets"
        + (f", and starts {downstream.name}." if downstream is not None else "."),
    )
    def checkpoint_catalog_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        cursor = SensorCursor.parse(context.cursor)
        catalog = catalog_of(context, catalog_key)
        # Read before the events: another process may have reported up to here.
        latest = catalog.events.latest_sequence()
        if latest < cursor.sequence:
            # A re-created catalog counts from one again.
            cursor = SensorCursor(downstream_due=cursor.downstream_due, downstream_at_ms=cursor.downstream_at_ms)
        known = memory.get(cursor.tick)
        reported = known or Reported(latest)
        events = catalog.events.after(cursor.sequence, limit=EVENTS_PER_TICK if known else EVENTS_IN_FIRST_TICK)
        ours = [event for event in events if event.stream_id in keys]
        tick_report = _tick_report(
            context.instance,
            catalog,
            keys,
            ours,
            reported,
            since=cursor.sequence,
            interval_ms=report_interval_seconds * 1000,
            page=page,
            others=others,
            log=context.log,
        )
        news = any(event.type in COMPLETED for event in ours)
        sequence, tick = cursor.sequence, cursor.tick
        if events:
            sequence, tick = events[-1].sequence, str(uuid.uuid4())
            memory.clear()
            memory[tick] = tick_report.reported
        due = downstream is not None and (cursor.downstream_due or news)
        started_at_ms = cursor.downstream_at_ms
        requests = []
        rested = wall_clock_ms() - started_at_ms >= downstream_interval_seconds * 1000
        if due and rested and downstream is not None and not _is_in_progress(context.instance, downstream.name):
            requests.append(
                dg.RunRequest(run_key=f"catalog-{sequence}@{catalog.deployment_id}", job_name=downstream.name)
            )
            due, started_at_ms = False, wall_clock_ms()
        return dg.SensorResult(
            run_requests=requests,
            asset_events=tick_report.reports,
            cursor=str(SensorCursor(sequence, due, started_at_ms, tick)),
            skip_reason=None if requests or tick_report.reports else dg.SkipReason("no new checkpoints"),
        )

    return checkpoint_catalog_sensor


@dataclass(frozen=True)
class _TickReport:
    reports: Sequence[Report]
    reported: Reported


def _tick_report(
    instance: dg.DagsterInstance,
    catalog: Catalog,
    keys: Mapping[str, Sequence[dg.AssetKey]],
    events: Sequence[EventRecord],
    reported: Reported,
    *,
    since: int,
    interval_ms: int,
    page: CheckpointPage | None,
    others: OtherDeployments,
    log: logging.Logger,
) -> _TickReport:
    if not any(event.type in (*DECISIVE, *_FAILED) for event in events):
        return _TickReport((), reported)
    stream_ids = sorted({event.stream_id for event in events})
    before = catalog.events.last_of(stream_ids, DECISIVE, up_to=since, each=REMEMBERED)
    ended = {event.stream_id for event in events if event.type is EventType.EXECUTION_ENDED}
    remembered = [event for stream_id in ended for event in before[stream_id]]
    snapshots = catalog.snapshots.by_id([event.snapshot_id for event in (*events, *remembered) if event.snapshot_id])
    to_report = list(events_to_report(events, before, snapshots, interval_ms=interval_ms))
    by_key: dict[dg.AssetKey, list[ReportedEvent]] = {}
    for each in to_report:
        for key in keys[each.event.stream_id]:
            by_key.setdefault(key, []).append(each)
    ours = catalog.deployment_id
    newest = _newest_reports(instance, by_key)
    silent = {
        stream_id
        for stream_id in {each.event.stream_id for each in to_report}
        if others.silence(stream_id, [newest[key].by for key in keys[stream_id] if key in newest], ours, log)
    }
    found = {key: each.sequence for key, each in newest.items() if each.by in (None, ours)}
    latest = {**reported.latest, **{key: sequence for key, sequence in found.items() if key not in reported.latest}}
    stored = {
        key: _stored(instance, key, of_key, latest.get(key, 0), reported, ours=ours) for key, of_key in by_key.items()
    }
    new = [
        (key, each)
        for each in to_report
        if each.event.stream_id not in silent
        for key in keys[each.event.stream_id]
        if identity(each.event) not in stored[key]
    ]
    tallies = _tallies(catalog, new, latest)
    reports = [
        failure_observation(key, each.event, ours)
        if each.is_failure
        else materialization(
            key,
            each.event,
            snapshots.get(each.event.snapshot_id or ""),
            tallies.get((key, each.event.sequence)),
            page,
            deployment=ours,
        )
        for key, each in new
    ]
    for key, each in new:
        if not each.is_failure:
            latest[key] = each.event.sequence
    return _TickReport(reports, Reported(reported.looked_up_to, latest))


class _NewestReport(NamedTuple):
    """Its sequence, and the deployment that made it; None: an older version."""

    sequence: int
    by: str | None


def _newest_reports(instance: dg.DagsterInstance, keys: Collection[dg.AssetKey]) -> dict[dg.AssetKey, _NewestReport]:
    found: dict[dg.AssetKey, _NewestReport] = {}
    for record in instance.get_asset_records(list(keys)) if keys else ():
        newest = record.asset_entry.last_materialization
        metadata = newest.asset_materialization.metadata if newest and newest.asset_materialization else {}
        sequence = number_in(metadata, SEQUENCE_KEY)
        if sequence is not None:
            found[record.asset_entry.asset_key] = _NewestReport(sequence, _deployment_in(metadata))
    return found


def _deployment_in(metadata: Mapping[str, dg.MetadataValue]) -> str | None:
    by = metadata.get(DEPLOYMENT_KEY)
    return str(by.value) if by is not None else None


def _stored(
    instance: dg.DagsterInstance,
    key: dg.AssetKey,
    to_report: Sequence[ReportedEvent],
    latest: int,
    reported: Reported,
    *,
    ours: str,
) -> frozenset[str]:
    doubtful = [each for each in to_report if each.event.sequence <= reported.looked_up_to]
    completed = [each.event for each in doubtful if not each.is_failure]
    failed = [each.event for each in doubtful if each.is_failure]
    found: frozenset[str] = frozenset()
    # Our reports are stored in catalog order: none follows the newest.
    if completed and not 0 < latest < completed[0].sequence:
        found |= already_reported(instance.fetch_materializations, key, completed, ours)
    if failed:
        found |= already_reported(instance.fetch_observations, key, failed, ours)
    return found


def already_reported(
    fetch: Callable[..., dg.EventRecordsResult], key: dg.AssetKey, news: Sequence[EventRecord], ours: str
) -> frozenset[str]:
    """Return which events an interrupted tick, or one before a reset of the cursor, has reported.

    `fetch` is the instance's `fetch_materializations` or `fetch_observations`.
    """
    candidates = {identity(event) for event in news}
    since = dg.AssetRecordsFilter(key, after_timestamp=min(event.at_ms for event in news) / 1000 - CLOCK_SKEW_S)
    found: set[str] = set()
    cursor: str | None = None
    while True:
        page = fetch(since, limit=PAGE, cursor=cursor)
        for record in page.records:
            reported = record.asset_materialization or record.asset_observation
            metadata = reported.metadata if reported else {}
            sequence, snapshot_id = number_in(metadata, SEQUENCE_KEY), metadata.get(SNAPSHOT_ID_KEY)
            if snapshot_id is not None and snapshot_id.value in candidates:
                found.add(str(snapshot_id.value))
            elif sequence is not None and sequence < news[0].sequence and _deployment_in(metadata) in (None, ours):
                return frozenset(found)
        if not page.has_more:
            return frozenset(found)
        cursor = page.cursor


def _tallies(
    catalog: Catalog, new: Sequence[tuple[dg.AssetKey, ReportedEvent]], latest: Mapping[dg.AssetKey, int]
) -> dict[tuple[dg.AssetKey, int], SnapshotTally]:
    before = dict(latest)
    reports, spans = [], []
    for key, each in new:
        if each.is_failure:
            continue
        event = each.event
        if key in before and before[key] < event.sequence:
            reports.append((key, event.sequence))
            spans.append((event.stream_id, before[key], event.sequence))
        before[key] = event.sequence
    return dict(zip(reports, catalog.history.tallies(spans), strict=True))


def _is_in_progress(instance: dg.DagsterInstance, job_name: str) -> bool:
    return bool(instance.get_runs(dg.RunsFilter(job_name=job_name, statuses=UNFINISHED), limit=1))
