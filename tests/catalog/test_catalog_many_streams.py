"""Questions about many streams at once, which the sensors ask at each tick: each stream gets its own answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.history import SnapshotHistory, SnapshotTally
from dagster_ckpt.catalog.records import EventType, SnapshotRecord, SnapshotTrigger, StartCause
from dagster_ckpt.values.modes import SnapshotKind
from dagster_ckpt.values.safe_parsing import LARGEST_LONG
from tests.catalog.conftest import holder
from tests.support.as_writer import as_writer, holding
from tests.support.manual_clock import ManualClock

STREAMS = ("orders", "payments", "quiet")


@pytest.fixture(autouse=True)
def streams(catalog: Catalog) -> None:
    for stream_id in STREAMS:
        catalog.streams.ensure(stream_id, name=stream_id, asset_key=stream_id, options={})


def begin_execution(catalog: Catalog, stream_id: str, name: str) -> str:
    execution_id = f"{stream_id}-{name}"
    as_writer(catalog, stream_id).executions.start(
        execution_id, run_id=f"run of {execution_id}", cause=StartCause.MANUAL, holder=holder(name)
    )
    return execution_id


def begin_snapshot(catalog: Catalog, stream_id: str, number: int, *, timeline: int = 0) -> str:
    snapshot_id = f"{stream_id}-{number}"
    as_writer(catalog, stream_id).snapshots.start(
        snapshot_id=snapshot_id,
        execution_id=None,
        kind=SnapshotKind.CHECKPOINT,
        number=number,
        trigger=SnapshotTrigger.PERIODIC,
        timeline=timeline,
    )
    return snapshot_id


def snapshot(catalog: Catalog, stream_id: str, number: int, *, timeline: int = 0, size: int = 10) -> SnapshotRecord:
    snapshot_id = begin_snapshot(catalog, stream_id, number, timeline=timeline)
    return as_writer(catalog).complete(snapshot_id, full_bytes=size, incremental_bytes=number, rows=number * 100)


def test_the_newest_execution_of_each_stream(catalog: Catalog) -> None:
    begin_execution(catalog, "orders", "a")
    newest = begin_execution(catalog, "orders", "b")
    only = begin_execution(catalog, "payments", "a")
    found = catalog.executions.latest_of(STREAMS)
    assert {stream_id: execution.execution_id for stream_id, execution in found.items()} == {
        "orders": newest,
        "payments": only,
    }


def test_unsettled_executions_by_their_runs(catalog: Catalog) -> None:
    begin_execution(catalog, "orders", "a")
    orders = begin_execution(catalog, "orders", "b")
    begin_execution(catalog, "payments", "a")
    assert catalog.executions.unsettled_runs() == {"orders": "run of orders-b", "payments": "run of payments-a"}
    assert [found.execution_id for found in catalog.executions.unsettled({"run of orders-b", "nope"})] == [orders]
    assert catalog.executions.unsettled(()) == []


def test_the_snapshot_that_each_stream_would_be_recovered_from(catalog: Catalog) -> None:
    snapshot(catalog, "orders", 1)
    newest = snapshot(catalog, "orders", 2)
    begin_snapshot(catalog, "orders", 3)
    first = snapshot(catalog, "payments", 1)
    snapshot(catalog, "payments", 2)
    as_writer(catalog, "payments").streams.switch_live_directory("/live/1", restored_snapshot_id=first.snapshot_id)
    assert catalog.history.newest_of(STREAMS) == {"orders": newest, "payments": first}


def test_the_history_of_each_stream(catalog: Catalog, clock: ManualClock) -> None:
    snapshot(catalog, "orders", 1, size=1)
    clock.now_ms += 1000
    since_ms = clock.now_ms
    snapshot(catalog, "orders", 2, size=2)
    clock.now_ms += 1000
    newest = snapshot(catalog, "orders", 3, size=3)
    catalog.snapshots.verified(newest.snapshot_id, None)
    clock.now_ms += 1000
    catalog.snapshots.verified("orders-2", "torn")
    for number, reason in ((4, "full"), (5, "gone")):
        as_writer(catalog).snapshots.fail(begin_snapshot(catalog, "orders", number), reason)
    as_writer(catalog).snapshots.fail(begin_snapshot(catalog, "payments", 1), "no disk")

    told = catalog.history.of_streams(dict.fromkeys([*STREAMS, "never started"], since_ms) | {"payments": 0})

    assert told == {
        "orders": SnapshotHistory(
            *(catalog.snapshots.get(each) for each in (newest.snapshot_id, "orders-2", "orders-2")), 2, "gone", 2
        ),
        "payments": SnapshotHistory(failures=1, last_failure="no disk"),
        "quiet": SnapshotHistory(),
        "never started": SnapshotHistory(),
    }


def test_the_slowest_of_the_last_checkpoints_of_each_stream(catalog: Catalog) -> None:
    for number, duration_ms in ((1, 90), (2, 50), (11, 10), (12, 70)):
        as_writer(catalog).complete(begin_snapshot(catalog, "orders", number), duration_ms=duration_ms)
    as_writer(catalog).complete(begin_snapshot(catalog, "payments", 1), duration_ms=20)

    told = catalog.history.of_streams(dict.fromkeys(STREAMS, 0))

    # Checkpoint 2 is not among the last ten any more.
    assert {stream_id: history.slowest_ms for stream_id, history in told.items()} == {
        "orders": 70,
        "payments": 20,
        "quiet": None,
    }


def test_what_checkpoints_amount_to_in_spans_of_events(catalog: Catalog) -> None:
    for number in (1, 2, 3):
        snapshot(catalog, "orders", number)
        snapshot(catalog, "payments", number)
    sequences = {event.snapshot_id: event.sequence for event in catalog.events.after(0)}
    spans = [
        ("orders", sequences["orders-1"], sequences["orders-3"]),
        ("quiet", 0, sequences["orders-3"]),
        ("payments", 0, sequences["payments-1"]),
    ]
    assert catalog.history.tallies(spans) == [
        SnapshotTally(2, 500, 5),
        SnapshotTally(0, 0, 0),
        SnapshotTally(1, 100, 1),
    ]
    assert catalog.history.tallies([]) == []


@pytest.mark.parametrize(("each", "of_orders"), [(1, [3]), (2, [2, 3]), (4, [1, 2, 3])])
def test_the_last_events_of_each_stream(catalog: Catalog, each: int, of_orders: list[int]) -> None:
    for number in (1, 2, 3):
        snapshot(catalog, "orders", number)
        as_writer(catalog).deleted(f"orders-{number}", "another type of event")
    snapshot(catalog, "payments", 1)
    up_to = catalog.events.latest_sequence()
    snapshot(catalog, "orders", 4)

    told = catalog.events.last_of(STREAMS, [EventType.CHECKPOINT_COMPLETED], up_to=up_to, each=each)

    assert {stream_id: [event.snapshot_id for event in found] for stream_id, found in told.items()} == {
        "orders": [f"orders-{number}" for number in of_orders],
        "payments": ["payments-1"],
        "quiet": [],
    }


def test_the_backlog_that_charts_draw_is_the_sum_over_all_partitions(catalog: Catalog) -> None:
    lags = {"records_behind": {"orders-0": 3, "orders-1": 4, "odd": "many"}}
    measured = as_writer(catalog).complete(begin_snapshot(catalog, "orders", 1), properties=lags)
    as_writer(catalog).complete(begin_snapshot(catalog, "orders", 2), properties={})
    # As a rebuild registers it, which reads the properties from the storage.
    found = replace(measured, snapshot_id="found", number=3, properties={"records_behind": {"orders-0": 2**70}})
    with holding(catalog) as lease:
        catalog.rebuilding.add_snapshots(lease, [found], next_number=4)

    drawn = {each.number: each.records_behind for each in catalog.history.figures("orders", limit=10)}

    assert drawn == {1: 7, 2: None, 3: LARGEST_LONG}
