from __future__ import annotations

import multiprocessing
import threading

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import RequestKind

WRITERS = 4
EACH = 15


def write(url: str, name: str) -> None:
    """In a process of its own: make events."""
    catalog = Catalog(url)
    for _ in range(EACH):
        request = catalog.requests.submit("orders", RequestKind.SAVEPOINT, origin=name)
        catalog.requests.withdraw(request.request_id)


@pytest.mark.thorough(but="sqlite")
def test_a_reader_beside_many_writers_sees_each_event_once_in_order(url: str, catalog: Catalog) -> None:
    seen: list[int] = []
    done = threading.Event()

    def read() -> None:
        cursor = 0
        while not (done.is_set() and cursor == catalog.events.latest_sequence()):
            for event in catalog.events.after(cursor, limit=7):
                seen.append(event.sequence)
                cursor = event.sequence

    reader = threading.Thread(target=read)
    reader.start()
    with multiprocessing.get_context("spawn").Pool(WRITERS) as pool:
        pool.starmap(write, [(url, f"writer-{number}") for number in range(WRITERS)])
    done.set()
    reader.join(timeout=60)
    assert seen == list(range(1, WRITERS * EACH + 1))


def test_an_event_is_not_seen_before_its_change_is_committed(catalog: Catalog) -> None:
    before = catalog.events.latest_sequence()
    with catalog.database.writing() as connection:
        from dagster_ckpt.catalog.records import EventType

        catalog.database.record_event(connection, "orders", EventType.RESTORED)
        connection.rollback()
    assert catalog.events.latest_sequence() == before
    assert catalog.events.after(before) == []
