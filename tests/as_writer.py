"""What a test writes into a catalog in place of a run: each write under the lease of the job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import CompletedImage, Holder, LeaseRecord
from dagster_ckpt.catalog.tables import jobs
from dagster_ckpt.stream.lease import LeaseKeeper

TEST = Holder("of the test", "run of the test", "host of the test", 1, 1, "boot of the test")
LONG_MS = 10**9


@contextmanager
def holding(catalog: Catalog, job_id: str = "orders") -> Iterator[LeaseRecord]:
    """The lease of a job: the present one, or one that is held for as long as this lasts."""
    present = catalog.leases.current(job_id)
    if present is not None:
        yield present
        return
    lease = catalog.leases.acquire(job_id, TEST, LONG_MS)
    try:
        yield lease
    finally:
        catalog.leases.release(job_id, lease.token)


@contextmanager
def keeping(catalog: Catalog, job_id: str = "orders") -> Iterator[LeaseKeeper]:
    """The same, as what prepares and deletes takes it; it is not renewed."""
    with holding(catalog, job_id) as lease:
        yield LeaseKeeper(catalog, lease)


class as_writer:  # noqa: N801 - reads as a word of the tests
    """The catalog with the writes of a run, each under the lease.

    `as_writer(catalog).executions.running(...)` is `catalog.executions.running(lease, ...)` with a lease that is held
    only for that, unless somebody holds one. Where an execution, image or request is named, the lease is that of its
    job; else of the job that is given.
    """

    def __init__(self, catalog: Catalog, job_id: str = "orders") -> None:
        self._catalog = catalog
        self._job_id = job_id

    def __getattr__(self, store: str) -> Any:
        return _Store(store, self._catalog, self._job_id)

    def complete(self, image_id: str, **facts: Any) -> Any:
        """Complete an image of a run, with only what the test is about."""
        facts.setdefault("location", f"file:///checkpoints/{image_id}")
        return self.images.complete(image_id, CompletedImage(**facts))

    def mark_deleting(self, image_id: str) -> None:
        with holding(self._catalog, self._catalog.images.get(image_id).job_id) as lease:
            self._catalog.images.mark_deleting(image_id, lease=lease)

    def deleted(self, image_id: str, reason: str) -> None:
        with holding(self._catalog, self._catalog.images.get(image_id).job_id) as lease:
            self._catalog.images.deleted(image_id, reason, lease=lease)


class _Store:
    def __init__(self, store: str, catalog: Catalog, job_id: str) -> None:
        self._store = store
        self._catalog = catalog
        self._job_id = job_id

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            is_named = self._store != "jobs" and name != "begin"
            job_id = getattr(self._catalog, self._store).get(arguments[0]).job_id if is_named else self._job_id
            with holding(self._catalog, job_id) as lease:
                return getattr(getattr(self._catalog, self._store), name)(lease, *arguments, **named)

        return call


def set_job(catalog: Catalog, job_id: str, **columns: object) -> None:
    """Give columns of a job's row values that no write of this package gives them just like that."""
    with catalog.database.writing() as connection:
        connection.execute(jobs.update().where(jobs.c.job_id == job_id).values(**columns))
