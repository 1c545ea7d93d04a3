"""Of many checkpoints few are told, and it does not matter from where the events are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dagster_ckpt.catalog.records import EventRecord, EventType, SnapshotRecord, SnapshotStatus, SnapshotTrigger
from dagster_ckpt.orchestration.catalog_sensor import DECISIVE, REMEMBERED, events_to_report
from dagster_ckpt.values.modes import SnapshotKind

CASES = yaml.safe_load((Path(__file__).parent / "reports.yaml").read_text(encoding="utf-8"))
KINDS = {
    "c": EventType.CHECKPOINT_COMPLETED,
    "m": EventType.CHECKPOINT_COMPLETED,
    "s": EventType.SAVEPOINT_COMPLETED,
    "f": EventType.CHECKPOINT_FAILED,
    "g": EventType.SAVEPOINT_FAILED,
    "S": EventType.EXECUTION_STARTED,
    "E": EventType.EXECUTION_ENDED,
    "R": EventType.RESTORED,
}
# Any minute of the clock.
BEGIN_MS = 60_000 * 29_000_000


def event(sequence: int, text: str) -> EventRecord:
    kind, second = text.split("@")
    return EventRecord(sequence, "orders", KINDS[kind], text, None, {}, BEGIN_MS + int(second) * 1000)


def snapshot(text: str) -> SnapshotRecord:
    trigger = SnapshotTrigger.MANUAL if text.startswith("m") else SnapshotTrigger.PERIODIC
    return SnapshotRecord(text, "orders", None, SnapshotKind.CHECKPOINT, 1, SnapshotStatus.COMPLETED, trigger, 0)


def reported_from(events: list[EventRecord], start: int, interval_ms: int = 60_000) -> list[str]:
    """What a reader tells that has dealt with the first `start` events."""
    before = [each for each in events[:start] if each.type in DECISIVE][-REMEMBERED:]
    snapshots = {text: snapshot(text) for text in (str(each.snapshot_id) for each in events)}
    reported = events_to_report(events[start:], {"orders": before}, snapshots, interval_ms=interval_ms)
    return [str(each.event.snapshot_id) for each in reported]


def read(case: dict[str, Any]) -> list[EventRecord]:
    return [event(sequence, text) for sequence, text in enumerate(case["events"], start=1)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["says"])
def test_what_is_reported(case: dict[str, Any]) -> None:
    assert reported_from(read(case), 0) == case["reported"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["says"])
def test_wherever_a_reader_stops_and_goes_on_it_tells_the_same(case: dict[str, Any]) -> None:
    events = read(case)
    for stop in range(len(events) + 1):
        assert [*reported_from(events[:stop], 0), *reported_from(events, stop)] == case["reported"]


def test_without_an_interval_every_snapshot_and_every_failure_is_reported() -> None:
    events = [event(n, text) for n, text in enumerate(["c@0", "c@0", "f@0", "f@0", "s@1", "c@1", "E@2"], start=1)]
    assert reported_from(events, 0, interval_ms=0) == ["c@0", "c@0", "f@0", "f@0", "s@1", "c@1"]


def test_streams_do_not_hide_each_others_checkpoints() -> None:
    mine, other = event(1, "c@0"), EventRecord(2, "shop", EventType.CHECKPOINT_COMPLETED, None, None, {}, BEGIN_MS)
    reported = events_to_report([mine, other], {}, {"c@0": snapshot("c@0")}, interval_ms=60_000)
    assert [each.event.sequence for each in reported] == [1, 2]
