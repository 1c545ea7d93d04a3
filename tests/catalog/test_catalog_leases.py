from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import EventType
from dagster_ckpt.catalog.tables import leases
from dagster_ckpt.errors import LeaseHeldError, LeaseLostError
from tests.catalog.conftest import holder
from tests.support.manual_clock import ManualClock

TTL_MS = 30_000


def race(url: str, name: str) -> str | None:
    """In a process of its own: who wins?"""
    catalog = Catalog(url)
    try:
        catalog.leases.acquire("orders", holder(name), TTL_MS)
    except LeaseHeldError:
        return None
    return name


def test_a_second_holder_is_refused_and_told_who_holds_it(catalog: Catalog) -> None:
    catalog.leases.acquire("orders", holder("a"), TTL_MS)
    with pytest.raises(LeaseHeldError, match=r"run run-a \(process 1 on host-a\).*expires in 30 s.*terminate that run"):
        catalog.leases.acquire("orders", holder("b"), TTL_MS)


def test_an_expired_lease_passes_on_with_a_higher_token(catalog: Catalog, clock: ManualClock) -> None:
    first = catalog.leases.acquire("orders", holder("a"), TTL_MS)
    clock.now_ms += TTL_MS
    second = catalog.leases.acquire("orders", holder("b"), TTL_MS)
    assert second.token == first.token + 1
    assert catalog.events.after(0)[-1].type is EventType.LEASE_TAKEN_OVER
    with pytest.raises(LeaseLostError, match="is held by run run-b"):
        catalog.leases.renew(first, TTL_MS)
    with pytest.raises(LeaseLostError, match="is held by run run-b"):
        catalog.leases.check(first)


def test_a_renewed_lease_does_not_expire(catalog: Catalog, clock: ManualClock) -> None:
    lease = catalog.leases.acquire("orders", holder("a"), TTL_MS)
    clock.now_ms += TTL_MS - 1
    catalog.leases.renew(lease, TTL_MS)
    clock.now_ms += TTL_MS - 1
    with pytest.raises(LeaseHeldError):
        catalog.leases.acquire("orders", holder("b"), TTL_MS)


def test_a_lease_is_taken_over_only_by_its_token(catalog: Catalog) -> None:
    lease = catalog.leases.acquire("orders", holder("a"), TTL_MS)
    with pytest.raises(LeaseHeldError):
        catalog.leases.acquire("orders", holder("b"), TTL_MS, take_over=replace(lease, token=lease.token + 1))
    taken = catalog.leases.acquire("orders", holder("b"), TTL_MS, take_over=lease)
    # A second successor with the same proof comes too late.
    with pytest.raises(LeaseHeldError, match="run-b"):
        catalog.leases.acquire("orders", holder("c"), TTL_MS, take_over=lease)
    assert taken.token == lease.token + 1


def test_a_released_lease_is_free_and_its_token_is_never_used_again(catalog: Catalog) -> None:
    lease = catalog.leases.acquire("orders", holder("a"), TTL_MS)
    catalog.leases.release(lease)
    catalog.leases.release(lease)
    assert catalog.leases.current("orders") is None
    assert catalog.leases.acquire("orders", holder("b"), TTL_MS).token == lease.token + 1
    # Releasing late takes nothing from the new holder.
    catalog.leases.release(lease)
    assert catalog.leases.current("orders") is not None


def test_a_token_that_a_database_issues_again_is_not_that_of_the_holder_before(catalog: Catalog) -> None:
    """A failover to a replica that lacked the newest acquisition: both renewed the lease and passed each check."""
    lost = catalog.leases.acquire("orders", holder("a"), TTL_MS)
    catalog.leases.release(lost)
    with catalog.database.writing() as connection:
        connection.execute(leases.update().values(token=lost.token - 1))
    lease = catalog.leases.acquire("orders", holder("b"), TTL_MS)
    assert lease.token == lost.token

    def write() -> None:
        with catalog.leases.held(lost):
            pytest.fail("its write was allowed")

    for call in (lambda: catalog.leases.renew(lost, TTL_MS), lambda: catalog.leases.check(lost), write):
        with pytest.raises(LeaseLostError, match="is held by run run-b"):
            call()
    with pytest.raises(LeaseHeldError, match="run-b"):
        catalog.leases.acquire("orders", holder("c"), TTL_MS, take_over=lost)
    catalog.leases.release(lost)
    catalog.leases.check(lease)


@pytest.mark.thorough(but="sqlite")
def test_of_many_processes_exactly_one_becomes_the_writer(url: str, catalog: Catalog) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        winners = [name for name in pool.starmap(race, [(url, name) for name in "abcd"]) if name]
    assert len(winners) == 1


def test_leases_go_by_the_clock_of_the_database(url: str, catalog: Catalog) -> None:
    by_the_database = Catalog(url)
    before_ms = time.time_ns() // 1_000_000
    lease = by_the_database.leases.acquire("orders", holder("a"), TTL_MS)
    # The server is on this machine; its clock is read to the ms.
    assert before_ms - 1 <= lease.acquired_at_ms <= time.time_ns() // 1_000_000 + 1
    assert lease.expires_at_ms == lease.acquired_at_ms + TTL_MS
    by_the_database.leases.renew(lease, 0)
    assert by_the_database.leases.acquire("orders", holder("b"), TTL_MS).token == lease.token + 1
    by_the_database.close()
