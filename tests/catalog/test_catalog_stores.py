from __future__ import annotations

import pytest
from sqlalchemy import text

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.pending_restore import ToSnapshot
from dagster_ckpt.catalog.records import (
    EventType,
    ExecutionStatus,
    RequestKind,
    RequestStatus,
    SnapshotRecord,
    SnapshotStatus,
    SnapshotTrigger,
    StartCause,
)
from dagster_ckpt.errors import CatalogError, SnapshotNotFoundError, StreamNotFoundError
from dagster_ckpt.values.modes import SnapshotKind
from tests.catalog.conftest import holder
from tests.support.as_writer import as_writer
from tests.support.manual_clock import ManualClock


def begin(catalog: Catalog, name: str, cause: StartCause = StartCause.MANUAL) -> str:
    execution_id = f"execution-{name}"
    as_writer(catalog).executions.start(execution_id, run_id=f"run-{name}", cause=cause, holder=holder(name))
    return execution_id


def snapshot(
    catalog: Catalog, number: int, *, kind: SnapshotKind = SnapshotKind.CHECKPOINT, timeline: int = 0
) -> SnapshotRecord:
    snapshot_id = f"snapshot-{number}"
    as_writer(catalog).snapshots.start(
        snapshot_id=snapshot_id,
        execution_id=None,
        kind=kind,
        number=number,
        trigger=SnapshotTrigger.PERIODIC,
        timeline=timeline,
    )
    return as_writer(catalog).complete(snapshot_id, location=f"file:///c/orders/chk-{number}", batch_id=number * 10)


def test_a_stream_that_was_never_started_is_told_with_those_that_were(catalog: Catalog) -> None:
    with pytest.raises(StreamNotFoundError, match=r"no stream 'nope'.*Streams in it: orders"):
        catalog.streams.get("nope")


def test_numbers_rise_and_are_never_given_twice(catalog: Catalog) -> None:
    assert [catalog.streams.allocate_number("orders") for _ in range(3)] == [1, 2, 3]


def test_registering_again_refreshes_and_loses_nothing(catalog: Catalog) -> None:
    as_writer(catalog).streams.switch_live_directory("/live/1")
    again = catalog.streams.ensure("orders", name="new", asset_key="a/b", options={"num_retained": 3})
    assert (again.name, again.asset_key, again.options["num_retained"]) == ("new", "a/b", 3)
    assert again.live_directory == "/live/1"


def test_a_restore_begins_a_timeline_and_going_on_does_not(catalog: Catalog) -> None:
    adopted = as_writer(catalog).streams.switch_live_directory("/live/1")
    assert (adopted.live_generation, adopted.timeline) == (1, 0)
    restored = as_writer(catalog).streams.switch_live_directory(
        "/live/2", restored_snapshot_id="snapshot-1", pending_restore=ToSnapshot(location="x")
    )
    assert (restored.live_generation, restored.timeline, restored.restored_snapshot_id) == (2, 1, "snapshot-1")
    assert restored.pending_restore == ToSnapshot(location="x")


def test_an_automatic_recovery_never_takes_a_snapshot_of_a_timeline_that_was_left(catalog: Catalog) -> None:
    first, second = snapshot(catalog, 1), snapshot(catalog, 2)
    as_writer(catalog).streams.switch_live_directory("/live/1", restored_snapshot_id=first.snapshot_id)
    third = snapshot(catalog, 3, timeline=1)
    assert [found.snapshot_id for found in catalog.snapshots.restorable("orders")] == [
        third.snapshot_id,
        first.snapshot_id,
    ]
    assert second in catalog.snapshots.completed("orders")


def test_a_new_execution_settles_those_before_and_fails_the_lost_one(catalog: Catalog) -> None:
    lost = begin(catalog, "a")
    begin(catalog, "b", StartCause.RESTART_NEW_RUN)
    record = catalog.executions.get(lost)
    assert record.status is ExecutionStatus.FAILED
    assert record.settled
    assert [found.execution_id for found in catalog.executions.unsettled()] == ["execution-b"]


def test_the_failure_history_begins_anew_when_a_person_starts_the_stream(catalog: Catalog, clock: ManualClock) -> None:
    for name, cause in (
        ("a", StartCause.MANUAL),
        ("b", StartCause.MANUAL),
        ("c", StartCause.RESTART_IN_PLACE),
        ("d", StartCause.RESTART_NEW_RUN),
    ):
        clock.now_ms += 1000
        catalog.executions.end_unheld(begin(catalog, name, cause), ExecutionStatus.FAILED, "boom")
    assert catalog.executions.failures_since_manual_start("orders") == [1_002_000, 1_003_000, 1_004_000]


def test_an_execution_ends_once(catalog: Catalog) -> None:
    execution = begin(catalog, "a")
    catalog.executions.end_unheld(execution, ExecutionStatus.CANCELED, "by a user")
    catalog.executions.end_unheld(execution, ExecutionStatus.FAILED, "too late")
    catalog.executions.settle(execution, ExecutionStatus.FAILED)
    record = catalog.executions.get(execution)
    assert (record.status, record.reason, record.settled) == (ExecutionStatus.CANCELED, "by a user", True)


def test_sinks_and_batch_come_from_the_newest_execution_that_reported_them(catalog: Catalog) -> None:
    first = begin(catalog, "a")
    as_writer(catalog).executions.running(first, live_directory="/live/1", recovery={})
    as_writer(catalog).executions.heartbeat(first, {"batch_id": 7, "sinks": ["FileSink[/out]"]})
    second = begin(catalog, "b")
    as_writer(catalog).executions.heartbeat(second, {"batch_id": None, "sinks": []})
    assert catalog.executions.last_sinks("orders") == ["FileSink[/out]"]
    assert catalog.executions.last_batch("orders", "/live/1") == 7
    assert catalog.executions.last_batch("orders", "/live/2") is None


def test_completing_a_snapshot_tells_of_it_and_failing_it_later_changes_nothing(catalog: Catalog) -> None:
    done = snapshot(catalog, 1)
    as_writer(catalog).snapshots.fail(done.snapshot_id, "too late")
    assert catalog.snapshots.get(done.snapshot_id).status is SnapshotStatus.COMPLETED
    told = [event.type for event in catalog.events.after(0) if event.snapshot_id == done.snapshot_id]
    assert told == [EventType.CHECKPOINT_COMPLETED]


def test_a_deletion_is_visible_until_the_bytes_are_gone(catalog: Catalog) -> None:
    done = snapshot(catalog, 1)
    as_writer(catalog).mark_deleting(done.snapshot_id)
    assert catalog.snapshots.completed("orders") == []
    assert catalog.snapshots.of_stream("orders", status=SnapshotStatus.DELETING)[0].snapshot_id == done.snapshot_id
    as_writer(catalog).deleted(done.snapshot_id, "subsumed")
    assert catalog.events.after(0)[-1].payload["reason"] == "subsumed"


def test_a_row_that_cannot_be_read_is_listed_as_broken(catalog: Catalog) -> None:
    done = snapshot(catalog, 1)
    with catalog.database.writing() as connection:
        connection.execute(text("UPDATE snapshots SET properties = '{oops', status = 'MELTED'"))
    (listed,) = catalog.snapshots.of_stream("orders")
    assert listed.snapshot_id == done.snapshot_id
    assert listed.status is SnapshotStatus.BROKEN
    assert "MELTED" in (listed.broken or "")
    assert catalog.snapshots.restorable("orders") == []


def test_an_unknown_snapshot_is_our_own_error(catalog: Catalog) -> None:
    with pytest.raises(SnapshotNotFoundError, match="no snapshot 'nope'"):
        catalog.snapshots.get("nope")


def test_a_request_is_answered_once(catalog: Catalog) -> None:
    request = catalog.requests.submit("orders", RequestKind.SAVEPOINT, arguments={"label": "x"}, origin="me")
    assert catalog.requests.pending("orders") == [request]
    assert as_writer(catalog).requests.accept(request.request_id)
    assert not as_writer(catalog).requests.accept(request.request_id)
    assert as_writer(catalog).requests.resolve(request.request_id, RequestStatus.COMPLETED, snapshot_id="snapshot-1")
    assert not catalog.requests.withdraw(request.request_id)
    answered = catalog.requests.get(request.request_id)
    assert (answered.status, answered.snapshot_id) == (RequestStatus.COMPLETED, "snapshot-1")


def test_a_withdrawn_request_is_not_taken_up(catalog: Catalog) -> None:
    request = catalog.requests.submit("orders", RequestKind.CANCEL, origin="me")
    assert catalog.requests.withdraw(request.request_id)
    assert not as_writer(catalog).requests.accept(request.request_id)
    assert catalog.requests.pending("orders") == []


def test_an_unknown_request_or_execution_is_our_own_error(catalog: Catalog) -> None:
    for ask in (catalog.requests.get, catalog.executions.get):
        with pytest.raises(CatalogError, match="nope"):
            ask("nope")
