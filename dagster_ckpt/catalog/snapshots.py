"""Checkpoints and savepoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, select

from dagster_ckpt.catalog import snapshot_queries as queries
from dagster_ckpt.catalog.database import Database, as_text, cells, read_dict, read_enum
from dagster_ckpt.catalog.holds import lock_image, standing
from dagster_ckpt.catalog.records import (
    CompletedImage,
    EventType,
    HoldKind,
    HoldRecord,
    ImageHistory,
    ImageRecord,
    ImageStatus,
    ImageTally,
    ImageTrigger,
    LeaseRecord,
)
from dagster_ckpt.catalog.streams import raise_counter
from dagster_ckpt.catalog.tables import images, jobs, recovery_failures, timelines
from dagster_ckpt.errors import CatalogError, ImageHeldError, ImageNotFoundError

CHECKPOINT = "CHECKPOINT"
SAVEPOINT = "SAVEPOINT"
# What an operator takes without a lease; a run's images carry its execution.
_OF_STOPPED = images.c.execution_id.is_(None) & (images.c.kind == SAVEPOINT)
_FIELDS = frozenset(field.name for field in fields(ImageRecord))


class ImageStore:
    """What the catalog knows of images. A row that cannot be read is listed as BROKEN, never left out."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(
        self,
        lease: LeaseRecord,
        *,
        image_id: str,
        execution_id: str,
        kind: str,
        number: int,
        trigger: ImageTrigger,
        timeline: int,
        label: str | None = None,
        request_id: str | None = None,
        schedule: str | None = None,
    ) -> ImageRecord:
        """Record that an execution takes an image; its number is used up by that.

        Raises:
            LeaseLostError: The lease is not held any more.
        """
        with self._database.writing_under(lease) as connection:
            raise_counter(connection, lease.job_id, number + 1)
            return self._begin(
                connection,
                image_id=image_id,
                job_id=lease.job_id,
                execution_id=execution_id,
                kind=kind,
                number=number,
                trigger=trigger.value,
                timeline=timeline,
                label=label,
                request_id=request_id,
                schedule=schedule,
            )

    def complete(self, lease: LeaseRecord, image_id: str, facts: CompletedImage) -> ImageRecord:
        """Record that an image of an execution is whole in storage.

        Raises:
            LeaseLostError: The lease is not held any more: the image is not recorded.
            CatalogError: It is not in progress any more.
        """
        with self._database.writing_under(lease) as connection:
            return self._complete(connection, image_id, images.c.job_id == lease.job_id, facts)

    def fail(self, lease: LeaseRecord, image_id: str, reason: str) -> None:
        """Record that an image of an execution was not taken; one that is completed stays as it is.

        Raises:
            LeaseLostError: The lease is not held any more.
        """
        with self._database.writing_under(lease) as connection:
            self._fail(connection, image_id, images.c.job_id == lease.job_id, reason)

    def begin_of_stopped(
        self,
        job_id: str,
        *,
        image_id: str,
        number: int,
        trigger: ImageTrigger,
        timeline: int,
        label: str | None = None,
        schedule: str | None = None,
    ) -> ImageRecord:
        """Record that a savepoint of a job that does not run is being taken. Nobody's lease is needed for that."""
        with self._database.writing() as connection:
            return self._begin(
                connection,
                image_id=image_id,
                job_id=job_id,
                execution_id=None,
                kind=SAVEPOINT,
                number=number,
                trigger=trigger.value,
                timeline=timeline,
                label=label,
                request_id=None,
                schedule=schedule,
            )

    def complete_of_stopped(self, image_id: str, facts: CompletedImage) -> ImageRecord:
        """Record that such a savepoint is whole in storage; never an image of an execution.

        Raises:
            CatalogError: It is not in progress any more.
        """
        with self._database.writing() as connection:
            return self._complete(connection, image_id, _OF_STOPPED, facts)

    def fail_of_stopped(self, image_id: str, reason: str) -> None:
        """Record that such a savepoint was not taken; one that is completed stays as it is."""
        with self._database.writing() as connection:
            self._fail(connection, image_id, _OF_STOPPED, reason)

    def verified(self, image_id: str, problem: str | None) -> None:
        """Record that an image was verified.

        Args:
            image_id: The image; one that the catalog does not know is passed over.
            problem: Why it cannot be restored, or None.
        """
        with self._database.writing() as connection:
            connection.execute(
                images.update()
                .where(images.c.image_id == image_id)
                .values(verified_at_ms=self._database.now_ms(connection), verified_problem=problem)
            )

    def give_to_job(self, image_id: str) -> None:
        """Record that a savepoint is the job's own from now on, which deletes it as it does a checkpoint."""
        with self._database.writing() as connection:
            _get(connection, image_id)
            connection.execute(images.update().where(images.c.image_id == image_id).values(claimed=True))

    def mark_deleting(self, image_id: str, *, lease: LeaseRecord | None) -> None:
        """Record that the bytes of an image are being deleted: nobody recovers from it any more.

        Args:
            image_id: The image.
            lease: The lease of the run or retention that deletes it; None where an operator does, beside any writer.

        Raises:
            ImageHeldError: Something holds it; nothing was changed. What is being deleted already is not held.
            ImageNotFoundError: There is none of this id.
            LeaseLostError: The lease is not held any more: the image stays as it is.
        """
        with self._database.writing_as(lease) as connection:
            row = lock_image(connection, image_id)
            if row is not None and row.status != ImageStatus.DELETING.value:
                _refuse_held(row, list(standing(connection, row, self._database.now_ms(connection))))
            _get(connection, image_id)
            connection.execute(
                images.update().where(images.c.image_id == image_id).values(status=ImageStatus.DELETING.value)
            )

    def deleted(self, image_id: str, reason: str, *, lease: LeaseRecord | None) -> None:
        """Record that the bytes of an image are gone, and why; told once, however many passes deleted it.

        Args:
            image_id: The image.
            reason: Why.
            lease: As it was for `mark_deleting`.

        Raises:
            LeaseLostError: The lease is not held any more: the next pass goes on.
        """
        with self._database.writing_as(lease) as connection:
            present = (images.c.image_id == image_id) & (images.c.status != ImageStatus.DELETED.value)
            gone = connection.execute(images.update().where(present).values(status=ImageStatus.DELETED.value)).rowcount
            image = _get(connection, image_id)
            if not gone:
                return
            payload = {"reason": reason, "location": image.location}
            self._database.tell(connection, image.job_id, EventType.IMAGE_DELETED, image_id=image_id, payload=payload)

    def get(self, image_id: str) -> ImageRecord:
        """One image.

        Raises:
            ImageNotFoundError: There is none of this id.
        """
        with self._database.reading() as connection:
            return _get(connection, image_id)

    def of_job(self, job_id: str, *, kind: str | None = None, status: ImageStatus | None = None) -> list[ImageRecord]:
        """Images of a job, newest first."""
        query = select(images).where(images.c.job_id == job_id)
        if kind is not None:
            query = query.where(images.c.kind == kind)
        if status is not None:
            query = query.where(images.c.status == status.value)
        # A row of that status in which something else cannot be read is BROKEN, not of that status.
        return [image for image in self._all(query) if status is None or image.status is status]

    def at_location(self, job_id: str, location: str) -> ImageRecord | None:
        """The image of a job that is or was at a location, in whatever state; the newest where there were several."""
        at_place = (images.c.job_id == job_id) & (images.c.location == location)
        return next(iter(self._all(select(images).where(at_place))), None)

    def completed(self, job_id: str) -> list[ImageRecord]:
        """Images of a job that a person may name as a starting point, newest first."""
        return self.of_job(job_id, status=ImageStatus.COMPLETED)

    def newest_checkpoint(self, job_id: str) -> ImageRecord | None:
        """The newest completed checkpoint: what the next one may share bytes with."""
        return next(iter(self.of_job(job_id, kind=CHECKPOINT, status=ImageStatus.COMPLETED)), None)

    def by_id(self, image_ids: Sequence[str]) -> dict[str, ImageRecord]:
        """These images, as far as the catalog knows them."""
        return {image.image_id: image for image in self._all(select(images).where(images.c.image_id.in_(image_ids)))}

    def tallies(self, spans: Sequence[tuple[str, int, int]]) -> list[ImageTally]:
        """What the checkpoints of a job amount to that were completed in a span of events, by one query.

        Args:
            spans: Job, the sequence before the first event, and that of the last.
        """
        if not spans:
            return []
        with self._database.reading() as connection:
            found = {row.place: row for row in connection.execute(queries.tallies(spans))}
        return [
            ImageTally(int(row.taken), int(row.rows or 0), int(row.incremental_bytes or 0))
            if (row := found.get(place)) is not None
            else ImageTally(0, 0, 0)
            for place in range(len(spans))
        ]

    def newest_of(self, job_ids: Sequence[str]) -> dict[str, ImageRecord]:
        """The newest restorable image of each of these jobs that has one, by one query."""
        with self._database.reading() as connection:
            return {row.job_id: _record(row) for row in connection.execute(queries.newest_restorable(job_ids))}

    def histories(self, windows: Mapping[str, int]) -> dict[str, ImageHistory]:
        """What the images of jobs tell of their health, by two queries where the windows are alike.

        Args:
            windows: By job, the begin of the window in which its images are compared in size, ms since the epoch. One
                that never started has an empty history.
        """
        told: list[Row[Any]] = []
        with self._database.reading() as connection:
            for since_ms in set(windows.values()):
                alike = [job_id for job_id, begin_ms in windows.items() if begin_ms == since_ms]
                told += connection.execute(queries.histories(alike, since_ms))
        named = self.by_id([image_id for row in told for image_id in (row.newest, row.verified) if image_id])
        return {job_id: ImageHistory() for job_id in windows} | {
            row.job_id: ImageHistory(
                newest=named.get(row.newest),
                verified=named.get(row.verified),
                failures=row.failures,
                last_failure=row.last_failure,
                bytes_before=row.bytes_before,
            )
            for row in told
        }

    def restorable(self, job_id: str) -> list[ImageRecord]:
        """Images that an automatic recovery may take, newest first.

        They are those of the job's current timeline, the one that this timeline began with, and those of the timelines
        it goes back to, up to the batch where each was left.
        """
        with self._database.reading() as connection:
            job = connection.execute(
                select(jobs.c.timeline, jobs.c.restored_image_id).where(jobs.c.job_id == job_id)
            ).one_or_none()
            begins = connection.execute(select(timelines).where(timelines.c.job_id == job_id)).all()
        if job is None:
            return []
        past = queries.past_of(job.timeline, {row.timeline: (row.parent, row.to_batch) for row in begins})
        return [
            image
            for image in self.completed(job_id)
            if image.timeline == job.timeline
            or image.image_id == job.restored_image_id
            or (image.batch_id is not None and image.batch_id <= past.get(image.timeline, -1))
        ]

    def _begin(self, connection: Connection, **values: str | int | None) -> ImageRecord:
        new = {"status": ImageStatus.IN_PROGRESS.value, "properties": "{}"}
        connection.execute(images.insert().values(**values, **new, created_at_ms=self._database.now_ms(connection)))
        return _get(connection, str(values["image_id"]))

    def _complete(
        self, connection: Connection, image_id: str, whose: ColumnElement[bool], facts: CompletedImage
    ) -> ImageRecord:
        values = {field.name: getattr(facts, field.name) for field in fields(facts)}
        completed = connection.execute(
            images.update()
            .where((images.c.image_id == image_id) & whose & (images.c.status == ImageStatus.IN_PROGRESS.value))
            .values(
                **values | {"properties": as_text(dict(facts.properties))},
                status=ImageStatus.COMPLETED.value,
                completed_at_ms=self._database.now_ms(connection),
            )
        )
        image = _get(connection, image_id)
        if not completed.rowcount:
            raise CatalogError(
                f"Image {image_id} of job {image.job_id!r} cannot be completed: the catalog has it as "
                f"{image.status.value}. Take another one."
            )
        if image.kind == CHECKPOINT:
            # It was taken after a batch of a query that runs: what recoveries failed at before is over.
            of_job = recovery_failures.c.job_id == image.job_id
            connection.execute(recovery_failures.update().where(of_job).values(is_over=True))
        self._tell(connection, image, "COMPLETED", {"batch_id": image.batch_id, "location": image.location})
        return image

    def _fail(self, connection: Connection, image_id: str, whose: ColumnElement[bool], reason: str) -> None:
        pending = (images.c.image_id == image_id) & whose & (images.c.status == ImageStatus.IN_PROGRESS.value)
        failed = images.update().where(pending).values(status=ImageStatus.FAILED.value, failure_reason=reason)
        if connection.execute(failed).rowcount:
            self._tell(connection, _get(connection, image_id), "FAILED", {"reason": reason})

    def _all(self, query: Select[Any]) -> list[ImageRecord]:
        with self._database.reading() as connection:
            ordered = query.order_by(images.c.number.desc(), images.c.created_at_ms.desc())
            return [_record(row) for row in connection.execute(ordered)]

    def _tell(self, connection: Connection, image: ImageRecord, what: str, payload: dict[str, Any]) -> None:
        kind = "CHECKPOINT" if image.kind == CHECKPOINT else "SAVEPOINT"
        self._database.tell(
            connection,
            image.job_id,
            EventType[f"{kind}_{what}"],
            image_id=image.image_id,
            execution_id=image.execution_id,
            payload=payload,
        )


def _refuse_held(image: Row[Any], found: Sequence[HoldRecord]) -> None:
    if found:
        named = "; ".join(f"{hold.kind.value.lower()} by {hold.holder}" for hold in found)
        raise ImageHeldError(
            f"image {image.image_id} of job {image.job_id!r} is held ({named})",
            passes=all(hold.kind is HoldKind.USE for hold in found),
        )


def _get(connection: Connection, image_id: str) -> ImageRecord:
    row = connection.execute(select(images).where(images.c.image_id == image_id)).one_or_none()
    if row is None:
        raise ImageNotFoundError(
            f"The catalog knows no image {image_id!r}. List the job's images for one it knows, or give a location."
        )
    return _record(row)


def _record(row: Row[Any]) -> ImageRecord:
    troubles: list[str] = []
    values = {name: value for name, value in cells(row, images, troubles).items() if name in _FIELDS}
    values["properties"] = read_dict(values["properties"], "properties", troubles) or {}
    values["trigger"] = read_enum(values["trigger"], ImageTrigger, ImageTrigger.UNKNOWN, "trigger", troubles)
    values["status"] = read_enum(values["status"], ImageStatus, ImageStatus.BROKEN, "status", troubles)
    if troubles:
        values["status"] = ImageStatus.BROKEN
        values["broken"] = "; ".join(troubles)
    return ImageRecord(**values)
