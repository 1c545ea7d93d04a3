"""The catalog as one object: a store for each thing it records, over one database."""

from __future__ import annotations

from typing import Any

from dagster_ckpt.catalog.database import Clock, Database
from dagster_ckpt.catalog.desired_states import DesiredStateStore
from dagster_ckpt.catalog.events import EventStore
from dagster_ckpt.catalog.executions import ExecutionStore
from dagster_ckpt.catalog.holds import HoldStore
from dagster_ckpt.catalog.images import ImageStore
from dagster_ckpt.catalog.jobs import JobStore
from dagster_ckpt.catalog.launches import LaunchStore
from dagster_ckpt.catalog.leases import LeaseStore
from dagster_ckpt.catalog.rebuilding import RebuildStore
from dagster_ckpt.catalog.recoveries import RecoveryStore
from dagster_ckpt.catalog.requests import RequestStore
from dagster_ckpt.catalog.schema import upgrade


class Catalog:
    """The record of jobs, executions, leases, images, holds, requests, events and desired states.

    Opening it makes or migrates its tables. Safe for several threads and processes at once; pickles as its URL.

    Args:
        url: SQLAlchemy URL, such as `sqlite:////var/lib/catalog.db` or
            `postgresql+psycopg://user@host/database`.
        clock: Gives the time in ms since the epoch; None asks the database.

    Raises:
        CatalogError: The database cannot be used, or is of a newer version.

    Example:
        >>> catalog = Catalog("sqlite:////var/lib/catalog.db")
        >>> [job.job_id for job in catalog.jobs.all()]
        ['orders']
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        self._url = url
        self._clock = clock
        self.database = Database(url, clock)
        upgrade(self.database)
        self.jobs = JobStore(self.database)
        self.executions = ExecutionStore(self.database)
        self.leases = LeaseStore(self.database)
        self.images = ImageStore(self.database)
        self.holds = HoldStore(self.database)
        self.rebuilding = RebuildStore(self.database)
        self.requests = RequestStore(self.database)
        self.launches = LaunchStore(self.database)
        self.events = EventStore(self.database)
        self.desired_states = DesiredStateStore(self.database)
        self.recoveries = RecoveryStore(self.database)

    def close(self) -> None:
        """Close every connection."""
        self.database.dispose()

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self._url, self._clock)


def _open(url: str, clock: Clock | None) -> Catalog:
    return Catalog(url, clock=clock)
