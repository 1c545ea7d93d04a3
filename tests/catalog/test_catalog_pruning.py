"""Old rows of a history go; whatever a decision needs stays, however old it is."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import func, select

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.history import KEPT_EXECUTIONS
from dagster_ckpt.catalog.records import (
    CompletedSnapshot,
    EventType,
    ExecutionStatus,
    Holder,
    RequestKind,
    SnapshotStatus,
    SnapshotTrigger,
    StartCause,
)
from dagster_ckpt.catalog.tables import events, executions, recovery_failures, requests, snapshots, streams
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.as_writer import as_writer, holding
from tests.support.manual_clock import ManualClock

STREAM = "orders"


def run(catalog: Catalog, number: int, *, live: str, sinks: bool = True) -> None:
    """One execution from start to end."""
    writer = as_writer(catalog, STREAM)
    name = f"execution-{number:03}"
    holder = Holder(name, "run", "host", 1, 1, "boot")
    writer.executions.start(name, run_id="run", cause=StartCause.MANUAL, holder=holder)
    writer.executions.running(name, live_directory=live, recovery={"kind": "RESUME"})
    if sinks:
        writer.executions.heartbeat(name, {"batch_id": number, "sinks": ["FileSink[/out]"]})
    writer.executions.end(name, ExecutionStatus.FAILED, "boom", settled=True)


def take(catalog: Catalog, number: int, *, to: SnapshotStatus) -> str:
    writer = as_writer(catalog, STREAM)
    name = f"snapshot-{number:03}"
    writer.snapshots.start(
        snapshot_id=name, execution_id="execution-000", kind=SnapshotKind.CHECKPOINT, number=number,
        trigger=SnapshotTrigger.PERIODIC, timeline=0,
    )  # fmt: skip
    if to is SnapshotStatus.FAILED:
        writer.snapshots.fail(name, "the disk is full")
        return name
    writer.snapshots.complete(name, CompletedSnapshot(f"file:///snapshots/chk-{number}", batch_id=number))
    if to is SnapshotStatus.DELETED:
        catalog.snapshots.mark_deleting(name, lease=None)
        catalog.snapshots.deleted(name, "subsumed", lease=None)
    return name


def count(catalog: Catalog, table: Any) -> int:
    with catalog.database.reading() as connection:
        return int(connection.execute(select(func.count()).select_from(table)).scalar_one())


@pytest.fixture
def old(catalog: Catalog, clock: ManualClock) -> Catalog:
    """A catalog with a history of 30 executions and 10 snapshots, all of them long ago."""
    catalog.streams.ensure(STREAM, name=STREAM, asset_key=STREAM, options={})
    as_writer(catalog, STREAM).streams.switch_live_directory("/live-2")
    for number in range(30):
        run(catalog, number, live="/live-2" if number == 3 else "/live-1", sinks=number < 5)
    for number in range(10):
        to = [SnapshotStatus.DELETED, SnapshotStatus.FAILED, SnapshotStatus.COMPLETED][min(number // 4, 2)]
        take(catalog, number, to=to)
    clock.now_ms += 1_000_000
    return catalog


@pytest.mark.thorough(but="sqlite")
def test_what_a_decision_needs_stays(old: Catalog, clock: ManualClock) -> None:
    old.snapshots.verified("snapshot-002", None)
    with old.database.writing() as connection:
        connection.execute(streams.update().values(restored_snapshot_id="snapshot-001"))

    pruned = old.pruning.prune(STREAM, before_ms=clock.now_ms - 1)

    left = {each.snapshot_id: each.status for each in old.snapshots.of_stream(STREAM)}
    assert set(left) == {"snapshot-001", "snapshot-002", "snapshot-008", "snapshot-009"}
    assert pruned.snapshots == 6
    kept = [each.execution_id for each in old.executions.of_stream(STREAM)]
    # The last ones, the last with sinks, and those of the live directory.
    assert kept == [f"execution-{number:03}" for number in [*range(29, 29 - KEPT_EXECUTIONS, -1), 4, 3]]
    assert old.executions.last_sinks(STREAM) == ["FileSink[/out]"]
    assert old.executions.last_batch(STREAM, "/live-2") == 3
    assert pruned.executions == 30 - KEPT_EXECUTIONS - 2


@pytest.mark.thorough(but="sqlite")
def test_nothing_young_goes(old: Catalog, clock: ManualClock) -> None:
    before = [count(old, table) for table in (snapshots, executions, events)]
    assert old.pruning.prune(STREAM, before_ms=clock.now_ms - 1_000_000 - 1).total == 0
    assert [count(old, table) for table in (snapshots, executions, events)] == before


def test_a_dry_run_counts_what_a_run_deletes(old: Catalog, clock: ManualClock) -> None:
    foreseen = old.pruning.prune(STREAM, before_ms=clock.now_ms, dry_run=True)
    assert count(old, executions) == 30
    assert old.pruning.prune(STREAM, before_ms=clock.now_ms) == foreseen
    assert old.pruning.prune(STREAM, before_ms=clock.now_ms).total == 0


@pytest.mark.thorough(but="sqlite")
def test_another_stream_keeps_its_history(old: Catalog, clock: ManualClock) -> None:
    old.streams.ensure("other", name="other", asset_key="other", options={})
    assert old.pruning.prune("other", before_ms=clock.now_ms).total == 0
    assert count(old, executions) == 30


@pytest.mark.thorough(but="sqlite")
def test_a_held_snapshot_and_an_open_request_stay(old: Catalog, clock: ManualClock) -> None:
    [newest, *_] = old.snapshots.completed(STREAM)
    old.holds.use([newest], holder="a reader", ttl_ms=10_000)
    opened = old.requests.submit(STREAM, RequestKind.SAVEPOINT, origin="a person")
    clock.now_ms += 1_000_000
    old.pruning.prune(STREAM, before_ms=clock.now_ms)
    assert newest.snapshot_id in {each.snapshot_id for each in old.snapshots.completed(STREAM)}
    assert old.requests.get(opened.request_id)
    assert count(old, requests) == 1


@pytest.mark.thorough(but="sqlite")
def test_resolved_failures_go_and_open_ones_stay(old: Catalog, clock: ManualClock) -> None:
    with holding(old, STREAM) as lease:
        for point, is_open in (("chk-1", False), ("chk-2", True)):
            old.recoveries.failed(lease, "execution-029", point, error="E", detail="d", batch_id=1)
            if not is_open:
                old.recoveries.forget(lease)
    clock.now_ms += 1_000_000
    assert old.pruning.prune(STREAM, before_ms=clock.now_ms).recovery_failures == 1
    assert [each.point for each in old.recoveries.of_stream(STREAM)] == ["chk-2"]
    assert count(old, recovery_failures) == 1


@pytest.mark.thorough(but="sqlite")
def test_events_keep_their_order_and_new_ones_follow(old: Catalog, clock: ManualClock) -> None:
    latest = old.events.latest_sequence()
    old.pruning.prune(STREAM, before_ms=clock.now_ms)
    assert old.events.after(0) == []
    take(old, 11, to=SnapshotStatus.COMPLETED)
    [event] = old.events.after(latest)
    assert (event.sequence, event.type) == (latest + 1, EventType.CHECKPOINT_COMPLETED)


def test_every_query_that_a_stream_ran_stays_known(old: Catalog, clock: ManualClock) -> None:
    """A table may still show its batches, which a roll-back would take for those of others."""
    for number, query in ((30, "first"), (31, "first"), (32, "second")):
        run(old, number, live="/live-1", sinks=False)
        with old.database.writing() as connection:
            named = executions.c.execution_id == f"execution-{number:03}"
            connection.execute(executions.update().where(named).values(progress=f'{{"query_id":"{query}"}}'))
    for number, query in ((10, "second"), (11, "of a snapshot"), (12, "of a snapshot")):
        name = take(old, number, to=SnapshotStatus.DELETED)
        with old.database.writing() as connection:
            connection.execute(snapshots.update().where(snapshots.c.snapshot_id == name).values(query_id=query))
    for number in range(40, 40 + KEPT_EXECUTIONS):
        run(old, number, live="/live-1", sinks=False)
    clock.now_ms += 1_000_000

    old.pruning.prune(STREAM, before_ms=clock.now_ms)

    left = {each.execution_id for each in old.executions.of_stream(STREAM)}
    assert {"execution-031", "execution-032"} <= left
    assert "execution-030" not in left
    assert {each.snapshot_id for each in old.snapshots.of_stream(STREAM)} >= {"snapshot-012"}
    assert "snapshot-011" not in {each.snapshot_id for each in old.snapshots.of_stream(STREAM)}
