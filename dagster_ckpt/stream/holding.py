"""Hold snapshots while they are read, so that no other process deletes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.errors import CatalogError
from dagster_ckpt.stream.handle import StreamHandle

# How long a killed reader keeps a snapshot from being deleted.
HOLD_TTL_MS = 60_000


@contextmanager
def holding(
    catalog: Catalog, snapshots: Sequence[SnapshotRecord | None], reader: str, *, ttl_ms: int = HOLD_TTL_MS
) -> Iterator[None]:
    """Hold snapshots for the duration of the context. A thread renews the holds.

    Args:
        catalog: The catalog.
        snapshots: The snapshots. None, and snapshots that the catalog does not list, are skipped.
        reader: Who reads them and why, as shown by the catalog.
        ttl_ms: How long the holds last if this process is killed.

    Raises:
        SnapshotNotFoundError: One of them was deleted after it was listed, or is being deleted.
    """
    wanted = [snapshot for snapshot in snapshots if snapshot is not None]
    holds = catalog.holds.use(wanted, holder=reader, ttl_ms=ttl_ms) if wanted else []
    if not holds:
        yield
        return
    ids = [hold.hold_id for hold in holds]
    over = threading.Event()

    def renew() -> None:
        while not over.wait(ttl_ms / 3000):
            # If the catalog is unavailable for longer than the holds last, the snapshots may be
            # deleted. The reader then fails with an error that says so.
            with suppress(CatalogError):
                catalog.holds.renew(ids, ttl_ms)

    thread = threading.Thread(target=renew, name=f"hold-{wanted[0].stream_id}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        # If the catalog is unavailable, the holds expire.
        with suppress(CatalogError):
            catalog.holds.release(ids)


@contextmanager
def holding_location(stream: StreamHandle, location: str, reader: str) -> Iterator[None]:
    """Hold the snapshot at a location if the catalog lists one there.

    Raises:
        SnapshotNotFoundError: The catalog lists one there that was deleted or is being deleted.
    """
    known = stream.catalog.snapshots.at_location(stream.stream_id, location)
    with holding(stream.catalog, [known], reader):
        yield
