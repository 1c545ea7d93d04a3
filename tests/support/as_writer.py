"""What a test writes into a catalog in place of a run: each write under the lease of the stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import CompletedSnapshot, Holder, LeaseRecord
from dagster_ckpt.catalog.tables import streams
from dagster_ckpt.stream.lease import LeaseKeeper

TEST = Holder("of the test", "run of the test", "host of the test", 1, 1, "boot of the test")
LONG_MS = 10**9


@contextmanager
def holding(catalog: Catalog, stream_id: str = "orders") -> Iterator[LeaseRecord]:
    """The lease of a stream: the present one, or one that is held for as long as this lasts."""
    present = catalog.leases.current(stream_id)
    if present is not None:
        yield present
        return
    lease = catalog.leases.acquire(stream_id, TEST, LONG_MS)
    try:
        yield lease
    finally:
        catalog.leases.release(lease)


@contextmanager
def keeping(catalog: Catalog, stream_id: str = "orders") -> Iterator[LeaseKeeper]:
    """The same, as what prepares and deletes takes it; it is not renewed."""
    with holding(catalog, stream_id) as lease:
        yield LeaseKeeper(catalog, lease)


class as_writer:  # noqa: N801 - reads as a word of the tests
    """The catalog with the writes of a run, each under the lease.

    `as_writer(catalog).executions.running(...)` is `catalog.executions.running(lease, ...)` with a lease that is held
    only for that, unless somebody holds one. Where an execution, snapshot or request is named, the lease is that of its
    stream; else of the stream that is given.
    """

    def __init__(self, catalog: Catalog, stream_id: str = "orders") -> None:
        self._catalog = catalog
        self._stream_id = stream_id

    def __getattr__(self, store: str) -> Any:
        return _Store(store, self._catalog, self._stream_id)

    def complete(self, snapshot_id: str, **facts: Any) -> Any:
        """Complete a snapshot of a run, with only what the test is about."""
        facts.setdefault("location", f"file:///checkpoints/{snapshot_id}")
        return self.snapshots.complete(snapshot_id, CompletedSnapshot(**facts))

    def mark_deleting(self, snapshot_id: str) -> None:
        with holding(self._catalog, self._catalog.snapshots.get(snapshot_id).stream_id) as lease:
            self._catalog.snapshots.mark_deleting(snapshot_id, lease=lease)

    def deleted(self, snapshot_id: str, reason: str) -> None:
        with holding(self._catalog, self._catalog.snapshots.get(snapshot_id).stream_id) as lease:
            self._catalog.snapshots.deleted(snapshot_id, reason, lease=lease)


class _Store:
    def __init__(self, store: str, catalog: Catalog, stream_id: str) -> None:
        self._store = store
        self._catalog = catalog
        self._stream_id = stream_id

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            is_named = self._store != "streams" and name != "start"
            stream_id = getattr(self._catalog, self._store).get(arguments[0]).stream_id if is_named else self._stream_id
            with holding(self._catalog, stream_id) as lease:
                return getattr(getattr(self._catalog, self._store), name)(lease, *arguments, **named)

        return call


def set_stream(catalog: Catalog, stream_id: str, **columns: object) -> None:
    """Give columns of a stream's row values that no write of this package gives them just like that."""
    with catalog.database.writing() as connection:
        connection.execute(streams.update().where(streams.c.stream_id == stream_id).values(**columns))
