"""Registering again what a catalog that was lost knew of a job: all of it in one transaction, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from dagster_ckpt.catalog.database import Database, as_text
from dagster_ckpt.catalog.records import ImageRecord, LeaseRecord
from dagster_ckpt.catalog.streams import raise_counter
from dagster_ckpt.catalog.tables import images, jobs, leases, timelines


@dataclass(frozen=True)
class RebuiltJob:
    """What is registered of a job that the catalog knows nothing of.

    Attributes:
        images: Its images.
        next_number: Above every number that is in use.
        live_directory: Where its query stood, or None.
        live_generation: The highest number of a live directory in its place.
        timeline: Its current timeline.
        restored_image_id: The image that this timeline began with, where known.
        begins: Of a timeline, the one it goes on from and the batch where that was left.
        plan: What the state is kept for, where known.
    """

    images: Sequence[ImageRecord]
    next_number: int
    live_directory: str | None
    live_generation: int
    timeline: int
    restored_image_id: str | None = None
    begins: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    plan: Mapping[str, Any] | None = None


class RebuildStore:
    """Writes of a rebuild."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add_images(self, lease: LeaseRecord, added: Sequence[ImageRecord], *, next_number: int) -> None:
        """Register images of a job that the catalog knows.

        Raises:
            LeaseLostError: The lease is not held any more; nothing was changed.
        """
        with self._database.writing_under(lease) as connection:
            for image in added:
                connection.execute(images.insert().values(**_columns(image)))
            raise_counter(connection, lease.job_id, next_number)

    def register(self, lease: LeaseRecord, rebuilt: RebuiltJob) -> None:
        """Register a job's images, where its query stood, and its timelines.

        What held the job's lease in the catalog before is not known, so its query is fenced off before the next start.

        Raises:
            LeaseLostError: The lease is not held any more; nothing was changed.
        """
        job_id = lease.job_id
        with self._database.writing_under(lease) as connection:
            for image in rebuilt.images:
                connection.execute(images.insert().values(**_columns(image)))
            for timeline, (parent, to_batch) in rebuilt.begins.items():
                begin = {"job_id": job_id, "timeline": timeline, "parent": parent, "to_batch": to_batch}
                connection.execute(timelines.insert().values(**begin))
            connection.execute(
                jobs.update()
                .where(jobs.c.job_id == job_id)
                .values(
                    live_directory=rebuilt.live_directory,
                    live_generation=rebuilt.live_generation,
                    timeline=rebuilt.timeline,
                    restored_image_id=rebuilt.restored_image_id,
                    plan=as_text(dict(rebuilt.plan)) if rebuilt.plan is not None else None,
                    updated_at_ms=self._database.now_ms(connection),
                )
            )
            raise_counter(connection, job_id, rebuilt.next_number)
            of_job = leases.c.job_id == job_id
            connection.execute(leases.update().where(of_job).values(predecessor_unproven=True))


def _columns(image: ImageRecord) -> dict[str, Any]:
    known = {column.name for column in images.columns}
    values = {each.name: getattr(image, each.name) for each in fields(image) if each.name in known}
    return values | {
        "status": image.status.value,
        "trigger": image.trigger.value,
        "properties": as_text(dict(image.properties)),
    }
