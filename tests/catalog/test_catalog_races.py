"""Two writers at once, the second caught at the point where it could do harm: while the first has all but committed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import UpgradePhase, UpgradeRecord
from dagster_ckpt.catalog.records import EventType, SnapshotTrigger, StartCause, StreamRecord
from dagster_ckpt.errors import LeaseHeldError, SnapshotHeldError
from dagster_ckpt.policies.upgrade import UpgradeMode
from dagster_ckpt.values.modes import DesiredState, SnapshotKind
from tests.catalog.conftest import holder
from tests.support.as_writer import as_writer

PATIENCE_S = 120
# Where the second writer waits for the first: SQLite's from its begin, PostgreSQL's at the row.
WAITS_AT = ("BEGIN IMMEDIATE", "INSERT INTO", "UPDATE streams", "UPDATE desired_states", "UPDATE event_counter")


@contextmanager
def beside_an_uncommitted(url: str, change: Callable[[Catalog], object]) -> Iterator[Catalog]:
    """A second catalog to write with, while `change` is made and not committed before that writer waits for it."""
    first, second = Catalog(url), Catalog(url)
    made, waiting = threading.Event(), threading.Event()
    thread = threading.Thread(target=change, args=(first,))

    @event.listens_for(first.database.engine, "commit")
    def hold(_connection: object) -> None:
        if threading.current_thread() is thread:
            made.set()
            assert waiting.wait(PATIENCE_S)

    @event.listens_for(second.database.engine, "before_cursor_execute")
    def notice(_connection: object, _cursor: object, statement: str, *_rest: Any) -> None:
        # Catalogs of one process share their engine.
        if threading.current_thread() is not thread and (
            statement.startswith(WAITS_AT) or statement.endswith("FOR UPDATE")
        ):
            waiting.set()

    thread.start()
    try:
        assert made.wait(PATIENCE_S)
        yield second
    finally:
        waiting.set()
        thread.join(PATIENCE_S)
        first.close()
        second.close()


def test_of_two_first_holders_the_later_is_told_who_holds_the_lease(url: str, catalog: Catalog) -> None:
    with (
        beside_an_uncommitted(url, lambda first: first.leases.acquire("orders", holder("a"), 30_000)) as second,
        pytest.raises(LeaseHeldError, match="run-a"),
    ):
        second.leases.acquire("orders", holder("b"), 30_000)


def test_two_processes_make_a_stream_known_at_once(url: str, catalog: Catalog) -> None:
    def ensure(by: Catalog, name: str) -> StreamRecord:
        return by.streams.ensure("new", name=name, asset_key="new", options={})

    with beside_an_uncommitted(url, lambda first: ensure(first, "first")) as second:
        assert ensure(second, "second").name == "second"
    assert [stream.stream_id for stream in catalog.streams.all()] == ["new", "orders"]


def test_two_switches_of_the_live_directory_both_count(url: str, catalog: Catalog) -> None:
    lease = catalog.leases.acquire("orders", holder(), 60_000)

    def switch(by: Catalog, directory: str) -> StreamRecord:
        return by.streams.switch_live_directory(lease, directory, restored_snapshot_id="snapshot-1")

    with beside_an_uncommitted(url, lambda first: switch(first, "/live/a")) as second:
        switched = switch(second, "/live/b")
    assert (switched.live_generation, switched.timeline, switched.live_directory) == (2, 2, "/live/b")


def test_what_a_person_says_while_the_sensor_records_is_not_undone(url: str, catalog: Catalog) -> None:
    row = catalog.desired_states.ensure("orders", origin="a test")

    def say(first: Catalog) -> None:
        first.desired_states.put("orders", DesiredState.CANCELED, origin="anna")

    with beside_an_uncommitted(url, say) as second:
        assert not second.desired_states.advance(row, upgrade=None, alert=None, request_id=None, reached=True)

    after = catalog.desired_states.find("orders")
    assert after is not None
    assert (after.generation, after.reached, after.desired) == (row.generation + 1, 0, DesiredState.CANCELED)


def test_a_terminal_failure_that_two_processes_settle_at_once_is_recorded_once(url: str, catalog: Catalog) -> None:
    """Found by reading: both looked for the event before either had written it, so there were two alerts."""
    as_writer(catalog).executions.start("e", run_id="run", cause=StartCause.MANUAL, holder=holder())

    def settle(by: Catalog) -> None:
        by.executions.record_terminal_failure("e", "no restart is left")

    with beside_an_uncommitted(url, settle) as second:
        settle(second)
    recorded = [each for each in catalog.events.after(0) if each.type is EventType.TERMINALLY_FAILED]
    assert len(recorded) == 1


@pytest.mark.parametrize("first", ["upgrade", "deletion"])
def test_an_upgrade_names_no_snapshot_that_is_being_deleted(url: str, catalog: Catalog, first: str) -> None:
    """Found by reading: an upgrade that was recorded beside an uncommitted deletion could not be rolled back."""
    completed_snapshot(catalog)
    row = catalog.desired_states.ensure("orders", origin="a test")
    upgrade = UpgradeRecord(
        UpgradePhase.STARTING,
        "1",
        "2",
        UpgradeMode.LAST_STATE,
        began_at_ms=1,
        reason="a test",
        snapshot_id="snapshot-1",
    )

    def name_it(by: Catalog) -> bool:
        return by.desired_states.advance(row, upgrade=upgrade, alert=None, request_id=None)

    def delete(by: Catalog) -> None:
        by.snapshots.mark_deleting("snapshot-1", lease=None)

    if first == "upgrade":
        with beside_an_uncommitted(url, name_it) as second, pytest.raises(SnapshotHeldError, match="upgrade"):
            delete(second)
    else:
        with beside_an_uncommitted(url, delete) as second:
            assert not name_it(second)

    after = catalog.desired_states.find("orders")
    assert after is not None
    assert (after.upgrade is not None) == (first == "upgrade")


def test_a_snapshot_that_two_passes_delete_is_told_of_once(catalog: Catalog) -> None:
    completed_snapshot(catalog)
    before = catalog.events.latest_sequence()
    for _ in range(2):
        as_writer(catalog).mark_deleting("snapshot-1")
    for _ in range(2):
        as_writer(catalog).deleted("snapshot-1", "subsumed")
    assert len(catalog.events.after(before)) == 1


def completed_snapshot(catalog: Catalog) -> None:
    as_writer(catalog).snapshots.start(
        snapshot_id="snapshot-1",
        execution_id=None,
        kind=SnapshotKind.CHECKPOINT,
        number=1,
        trigger=SnapshotTrigger.PERIODIC,
        timeline=0,
    )
    as_writer(catalog).complete("snapshot-1", location="file:///c/orders/chk-1")
