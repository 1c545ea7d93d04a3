"""Holding images while they are read: whoever reads an image holds it, and nobody else deletes it meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ImageRecord
from dagster_ckpt.errors import CatalogError
from dagster_ckpt.stream.handle import StreamingJob

# How long a reader that was killed keeps an image from being deleted.
HOLD_TTL_MS = 60_000


@contextmanager
def holding(
    catalog: Catalog, images: Sequence[ImageRecord | None], reader: str, *, ttl_ms: int = HOLD_TTL_MS
) -> Iterator[None]:
    """Hold images as long as the context lasts; a thread renews the holds.

    Args:
        catalog: The catalog.
        images: The images; None, and one that the catalog does not list, is passed over.
        reader: Who reads them and what for, as the catalog shows it.
        ttl_ms: How long the holds last if this process is killed.

    Raises:
        ImageNotFoundError: One of them has been deleted since it was listed, or is being deleted.
    """
    wanted = [image for image in images if image is not None]
    holds = catalog.holds.use(wanted, holder=reader, ttl_ms=ttl_ms) if wanted else []
    if not holds:
        yield
        return
    ids = [hold.hold_id for hold in holds]
    over = threading.Event()

    def renew() -> None:
        while not over.wait(ttl_ms / 3000):
            # Where the catalog is away for longer than the holds last, what is read may go; the reader then says so.
            with suppress(CatalogError):
                catalog.holds.renew(ids, ttl_ms)

    thread = threading.Thread(target=renew, name=f"hold-{wanted[0].job_id}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        # Where the catalog is away they run out.
        with suppress(CatalogError):
            catalog.holds.release(ids)


@contextmanager
def holding_location(job: StreamingJob, location: str, reader: str) -> Iterator[None]:
    """Hold the image at a location, where the catalog lists one there.

    Raises:
        ImageNotFoundError: One was listed there, and has been deleted since or is being deleted.
    """
    known = job.catalog.images.at_location(job.job_id, location)
    with holding(job.catalog, [known], reader):
        yield
