"""The journal of planned batches, in both databases."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.journal import PlannedBatch
from dagster_ckpt.catalog.pending_restore import Emptied, ToBatch
from dagster_ckpt.catalog.records import LeaseRecord, StateOrigin
from dagster_ckpt.errors import LeaseLostError
from tests.catalog.conftest import holder
from tests.support.manual_clock import ManualClock


def planned(*batches: int, files: str = "offsets of", **given: Any) -> list[PlannedBatch]:
    return [
        PlannedBatch(batch, f"digest {batch - 1}", {f"offsets/{batch}": f"{files} {batch}\x00".encode()}, **given)
        for batch in batches
    ]


def leased(catalog: Catalog, name: str = "a", ttl_ms: int = 30_000) -> LeaseRecord:
    return catalog.leases.acquire("orders", holder(name), ttl_ms=ttl_ms)


@pytest.fixture
def lease(catalog: Catalog) -> LeaseRecord:
    return leased(catalog)


def test_batches_come_back_as_they_were_noted(catalog: Catalog, lease: LeaseRecord) -> None:
    catalog.journal.note(lease, planned(4, 5))
    catalog.journal.note(lease, planned(6, is_committed=True))

    assert catalog.journal.after("orders", 3) == [*planned(4, 5), *planned(6, is_committed=True)]
    assert catalog.journal.after("orders", 5) == planned(6, is_committed=True)
    assert catalog.journal.after("orders", 6) == []
    assert catalog.journal.after("payments", 3) == []


def test_the_rows_of_a_batch_are_noted_after_its_plan(catalog: Catalog, lease: LeaseRecord) -> None:
    catalog.journal.note(lease, planned(4, 5))

    catalog.journal.note_rows(lease, {5: 10, 9: 1})

    assert catalog.journal.after("orders", 3) == [*planned(4), *planned(5, rows=10)]


def test_what_was_planned_otherwise_since_replaces_all_that_followed(catalog: Catalog, lease: LeaseRecord) -> None:
    catalog.journal.note(lease, planned(4, 5, 6))
    catalog.journal.note(lease, planned(5, files="others than of"))

    assert catalog.journal.after("orders", 3) == [*planned(4), *planned(5, files="others than of")]


def test_a_gap_ends_what_can_be_replayed(catalog: Catalog, lease: LeaseRecord) -> None:
    catalog.journal.note(lease, planned(4, 5, 7))

    assert catalog.journal.after("orders", 3) == planned(4, 5)
    assert catalog.journal.after("orders", 2) == []


@pytest.mark.parametrize("broken", ["no JSON", "[]", '{"offsets/5": 1}', '{"offsets/5": "bm90IGNvbXByZXNzZWQ="}'])
def test_so_does_an_entry_that_cannot_be_read(catalog: Catalog, lease: LeaseRecord, broken: str) -> None:
    catalog.journal.note(lease, planned(4, 5, 6))
    with catalog.database.writing() as connection:
        connection.exec_driver_sql(f"UPDATE planned_batches SET files = '{broken}' WHERE batch_id = 5")

    assert catalog.journal.after("orders", 3) == planned(4)


def test_a_stream_that_goes_back_forgets_the_batches_after(catalog: Catalog, lease: LeaseRecord) -> None:
    catalog.journal.note(lease, planned(4, 5, 6))

    catalog.streams.switch_live_directory(
        lease, "/live/2", origin=StateOrigin.of_directory("/live/1", 5, None), pending_restore=ToBatch(batch_id=5)
    )

    assert catalog.journal.after("orders", 3) == planned(4, 5)

    catalog.streams.switch_live_directory(lease, "/live/3", origin=StateOrigin.empty(None), pending_restore=Emptied())

    assert catalog.journal.after("orders", 3) == []


def test_batches_that_a_start_is_about_to_undo_are_forgotten_by_the_writer_alone(
    catalog: Catalog, lease: LeaseRecord
) -> None:
    catalog.journal.note(lease, planned(4, 5, 6))

    catalog.journal.forget_after(lease, 5)

    assert catalog.journal.after("orders", 3) == planned(4, 5)

    catalog.leases.release(lease)
    with pytest.raises(LeaseLostError):
        catalog.journal.forget_after(lease, 3)

    assert catalog.journal.after("orders", 3) == planned(4, 5)


def test_a_stream_that_continues_in_another_directory_forgets_nothing(catalog: Catalog, lease: LeaseRecord) -> None:
    catalog.journal.note(lease, planned(4, 5))

    catalog.streams.switch_live_directory(lease, "/live/2", origin=StateOrigin.of_directory("/live/1", 4, None))

    assert catalog.journal.after("orders", 3) == planned(4, 5)


def test_a_former_writer_notes_nothing(catalog: Catalog, lease: LeaseRecord, clock: ManualClock) -> None:
    catalog.journal.note(lease, planned(4))
    clock.now_ms += 60_000
    leased(catalog, "b")

    with pytest.raises(LeaseLostError):
        catalog.journal.note(lease, planned(4, 5, files="others than of"))

    assert catalog.journal.after("orders", 3) == planned(4)
