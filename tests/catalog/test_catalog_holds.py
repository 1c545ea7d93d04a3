from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from sqlalchemy import text

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.pending_restore import Forked, PendingRestore, ToSnapshot
from dagster_ckpt.catalog.records import (
    HoldKind,
    RequestKind,
    RequestStatus,
    SnapshotRecord,
    SnapshotStatus,
    SnapshotTrigger,
)
from dagster_ckpt.errors import SnapshotHeldError, SnapshotNotFoundError
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.as_writer import as_writer
from tests.support.manual_clock import ManualClock


@pytest.fixture
def snapshot(catalog: Catalog) -> SnapshotRecord:
    return completed(catalog, 1)


def completed(catalog: Catalog, number: int) -> SnapshotRecord:
    snapshot_id = f"snapshot-{number}"
    writer = as_writer(catalog)
    writer.snapshots.start(
        snapshot_id=snapshot_id,
        execution_id="execution",
        kind=SnapshotKind.CHECKPOINT,
        number=number,
        trigger=SnapshotTrigger.PERIODIC,
        timeline=0,
    )
    made = writer.complete(snapshot_id, location=f"file:///snapshots/chk-{number}", batch_id=number)
    assert isinstance(made, SnapshotRecord)
    return made


def is_deletable(catalog: Catalog, snapshot: SnapshotRecord) -> bool:
    try:
        catalog.snapshots.mark_deleting(snapshot.snapshot_id, lease=None)
    except SnapshotHeldError:
        return False
    return True


def test_a_snapshot_in_use_is_not_deleted_until_its_reader_lets_go(catalog: Catalog, snapshot: SnapshotRecord) -> None:
    [hold] = catalog.holds.use([snapshot], holder="verification", ttl_ms=1_000)

    with pytest.raises(
        SnapshotHeldError, match=r"snapshot-1 of stream 'orders' is held \(use by verification\)"
    ) as refused:
        catalog.snapshots.mark_deleting(snapshot.snapshot_id, lease=None)
    assert refused.value.passes
    assert catalog.snapshots.get(snapshot.snapshot_id).status is SnapshotStatus.COMPLETED

    catalog.holds.release([hold.hold_id])
    assert is_deletable(catalog, snapshot)


def test_the_hold_of_a_reader_that_died_runs_out_on_the_databases_clock(
    catalog: Catalog, snapshot: SnapshotRecord, clock: ManualClock
) -> None:
    [hold] = catalog.holds.use([snapshot], holder="a reader", ttl_ms=1_000)
    clock.now_ms += 900
    assert catalog.holds.renew([hold.hold_id], 1_000)
    clock.now_ms += 900
    assert not is_deletable(catalog, snapshot)
    clock.now_ms += 200
    assert catalog.holds.on(snapshot.snapshot_id) == []
    assert is_deletable(catalog, snapshot)


def test_what_ran_out_is_forgotten_by_the_next_reader_and_not_renewed(
    catalog: Catalog, snapshot: SnapshotRecord, clock: ManualClock
) -> None:
    [dead] = catalog.holds.use([snapshot], holder="dead", ttl_ms=1)
    clock.now_ms += 1
    catalog.holds.use([snapshot], holder="alive", ttl_ms=1_000)

    assert not catalog.holds.renew([dead.hold_id], 1_000)
    assert [hold.holder for hold in catalog.holds.on(snapshot.snapshot_id)] == ["alive"]


@pytest.mark.parametrize("status", [SnapshotStatus.DELETING, SnapshotStatus.DELETED])
def test_a_reader_that_comes_too_late_is_told_so_with_what_there_is(
    catalog: Catalog, snapshot: SnapshotRecord, status: SnapshotStatus
) -> None:
    completed(catalog, 2)
    catalog.snapshots.mark_deleting(snapshot.snapshot_id, lease=None)
    if status is SnapshotStatus.DELETED:
        catalog.snapshots.deleted(snapshot.snapshot_id, "subsumed", lease=None)

    with pytest.raises(
        SnapshotNotFoundError, match=rf"chk-1 of stream 'orders'.* is {status.value}: since .*now has: chk-2"
    ):
        catalog.holds.use([snapshot], holder="late", ttl_ms=1_000)


def test_a_snapshot_that_the_catalog_does_not_list_there_needs_no_hold(
    catalog: Catalog, snapshot: SnapshotRecord
) -> None:
    copied = replace(snapshot, location="file:///elsewhere/chk-1")
    unknown = replace(snapshot, snapshot_id="of another catalog")

    assert catalog.holds.use([copied, unknown], holder="a reader", ttl_ms=1_000) == []
    assert is_deletable(catalog, snapshot)


def test_a_tag_keeps_a_snapshot_until_it_is_released(
    catalog: Catalog, snapshot: SnapshotRecord, clock: ManualClock
) -> None:
    catalog.holds.tag(snapshot.snapshot_id, label="first", holder="a person")
    catalog.holds.tag(snapshot.snapshot_id, label="before-release", holder="a person")
    clock.now_ms += 10**12

    with pytest.raises(SnapshotHeldError) as refused:
        catalog.snapshots.mark_deleting(snapshot.snapshot_id, lease=None)
    assert not refused.value.passes
    assert catalog.holds.tagged("orders") == {snapshot.snapshot_id}
    assert [hold.kind for hold in catalog.holds.on(snapshot.snapshot_id)] == [HoldKind.TAG]
    assert catalog.snapshots.get(snapshot.snapshot_id).label == "before-release"

    assert catalog.holds.release_tag(snapshot.snapshot_id)
    assert not catalog.holds.release_tag(snapshot.snapshot_id)
    assert catalog.snapshots.get(snapshot.snapshot_id).label is None
    assert is_deletable(catalog, snapshot)
    with pytest.raises(SnapshotNotFoundError):
        catalog.holds.tag(snapshot.snapshot_id, label=None, holder="too late")


@pytest.mark.parametrize("end", [RequestStatus.COMPLETED, RequestStatus.FAILED, None])
def test_a_start_that_is_asked_for_holds_its_snapshot_until_it_is_answered(
    catalog: Catalog, snapshot: SnapshotRecord, clock: ManualClock, end: RequestStatus | None
) -> None:
    request = catalog.requests.submit("orders", RequestKind.START, origin="a person", holding=snapshot.snapshot_id)
    clock.now_ms += 10**12
    assert not is_deletable(catalog, snapshot)
    as_writer(catalog).requests.accept(request.request_id)
    assert not is_deletable(catalog, snapshot)

    if end is None:
        catalog.requests.withdraw(request.request_id)
    else:
        as_writer(catalog).requests.resolve(request.request_id, end)
    assert is_deletable(catalog, snapshot)


def test_a_start_from_a_snapshot_that_is_being_deleted_is_not_asked_for(
    catalog: Catalog, snapshot: SnapshotRecord
) -> None:
    catalog.snapshots.mark_deleting(snapshot.snapshot_id, lease=None)
    with pytest.raises(SnapshotNotFoundError, match="is DELETING"):
        catalog.requests.submit(
            "orders", RequestKind.START, origin="late", request_id="r", holding=snapshot.snapshot_id
        )
    assert catalog.requests.find("r") is None


@pytest.mark.parametrize("names_it", ["location", "snapshot_id"])
def test_a_restore_or_a_fork_that_is_not_finished_holds_what_it_began_with(
    catalog: Catalog, snapshot: SnapshotRecord, names_it: str
) -> None:
    catalog.streams.ensure("fork", name="fork", asset_key="fork", options={})
    pending: PendingRestore = Forked(of_stream_id="orders", batch_id=5, snapshot_id=snapshot.snapshot_id)
    if names_it == "location":
        pending = ToSnapshot(location=snapshot.location or "")
    as_writer(catalog, "fork").streams.switch_live_directory("file:///live-1", pending_restore=pending)
    assert not is_deletable(catalog, snapshot)

    as_writer(catalog, "fork").streams.restore_finished()
    assert is_deletable(catalog, snapshot)


def test_an_upgrade_holds_what_it_would_be_rolled_back_to(catalog: Catalog, snapshot: SnapshotRecord) -> None:
    catalog.desired_states.ensure("orders", origin="a test")

    def upgrade(phase: str) -> None:
        with catalog.database.writing() as connection:
            stored = f'{{"snapshot_id":"{snapshot.snapshot_id}","phase":"{phase}"}}'
            connection.execute(text("UPDATE desired_states SET upgrade = :stored"), {"stored": stored})

    upgrade("UPGRADING")
    assert not is_deletable(catalog, snapshot)
    upgrade("STABLE")
    assert is_deletable(catalog, snapshot)


def test_of_a_reader_and_a_deletion_at_the_same_moment_one_is_first(url: str, catalog: Catalog) -> None:
    """The reader has its hold and the snapshot stays, or it is told that the snapshot is gone. Nothing between."""
    other = Catalog(url)
    for number in range(1, 21):
        snapshot = completed(catalog, number)
        begin = threading.Barrier(2)
        found: dict[str, bool] = {}

        def read(
            snapshot: SnapshotRecord = snapshot, begin: threading.Barrier = begin, found: dict[str, bool] = found
        ) -> None:
            begin.wait()
            try:
                found["held"] = bool(other.holds.use([snapshot], holder="a reader", ttl_ms=10**12))
            except SnapshotNotFoundError:
                found["held"] = False

        reader = threading.Thread(target=read)
        reader.start()
        begin.wait()
        deleted = is_deletable(catalog, snapshot)
        reader.join()
        assert found["held"] is not deleted
    other.close()
