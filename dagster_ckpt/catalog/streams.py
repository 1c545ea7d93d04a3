"""Streaming jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, select

from dagster_ckpt.catalog.database import Database, as_text, cells, read_dict
from dagster_ckpt.catalog.records import EventType, JobRecord, LeaseRecord
from dagster_ckpt.catalog.recovery_records import OriginKind, StateOrigin
from dagster_ckpt.catalog.tables import images, jobs, leases, timelines
from dagster_ckpt.errors import CatalogError, JobNotFoundError


class JobStore:
    """What the catalog knows of jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def ensure(self, job_id: str, *, name: str, asset_key: str, options: dict[str, Any]) -> JobRecord:
        """Make a job known, or refresh its name, asset key and options."""
        with self._database.writing() as connection:
            now_ms = self._database.now_ms(connection)
            described = {"name": name, "asset_key": asset_key, "options": as_text(options), "updated_at_ms": now_ms}
            new = {"live_generation": 0, "timeline": 0, "next_number": 1, "created_at_ms": now_ms}
            if not self._database.insert_if_absent(connection, jobs, job_id=job_id, **new, **described):
                connection.execute(jobs.update().where(jobs.c.job_id == job_id).values(**described))
            return _get(connection, job_id)

    def get(self, job_id: str) -> JobRecord:
        """One job.

        Raises:
            JobNotFoundError: It was never started.
            CatalogError: Its row says that a restore is to be finished, and not how.
        """
        with self._database.reading() as connection:
            return _get(connection, job_id)

    def all(self) -> list[JobRecord]:
        """Every job, by id; one whose row cannot be read is among them, and says so in `broken`."""
        with self._database.reading() as connection:
            return [_record(row) for row in connection.execute(select(jobs).order_by(jobs.c.job_id))]

    def restore_finished(self, lease: LeaseRecord) -> None:
        """Record that nothing of a restore is left to do.

        Raises:
            LeaseLostError: The lease is not held any more.
        """
        self._change_under(lease, pending_restore=None)

    def forget_live_directory(self, lease: LeaseRecord) -> None:
        """Record that the job has no live directory any more; its files may be deleted from now on.

        Raises:
            LeaseLostError: The lease is not held any more.
        """
        self._change_under(lease, live_directory=None, pending_restore=None)

    def count_from(self, lease: LeaseRecord, number: int) -> None:
        """Let the job's counter be at a number; one that is further already stays.

        Raises:
            LeaseLostError: The lease is not held any more.
        """
        with self._database.writing_under(lease) as connection:
            raise_counter(connection, lease.job_id, number)

    def prefer_savepoint(self, job_id: str, image_id: str) -> None:
        """Record what `preferred-savepoint` means: a person's choice, whoever runs the job."""
        with self._database.writing() as connection:
            self._change(connection, job_id, preferred_savepoint_id=image_id)

    def accept_plan(self, job_id: str, fingerprint: str, *, lease: LeaseRecord | None = None) -> None:
        """Let another plan go on from a job's state, once: a person has seen what is different.

        Args:
            job_id: The job.
            fingerprint: That of the plan.
            lease: The lease of the job, where a run records what its start was told.

        Raises:
            JobNotFoundError: It was never started.
            LeaseLostError: The lease is not held any more.
        """
        with self._database.writing_as(lease) as connection:
            _get(connection, job_id)
            self._change(connection, job_id, accepted_plan=fingerprint)

    def note_plan(self, lease: LeaseRecord, plan: Mapping[str, Any] | None) -> None:
        """Record what the query that is about to start keeps state for; None: not known.

        Raises:
            LeaseLostError: The lease is not held any more.
        """
        self._change_under(lease, plan=as_text(dict(plan or {})), accepted_plan=None)

    def allocate_number(self, job_id: str, *, lease: LeaseRecord | None = None) -> int:
        """Take the next number of the job's counter, for an image that no coordinator counts.

        Args:
            job_id: The job.
            lease: Its lease, where its run takes the image.

        Raises:
            LeaseLostError: The lease is not held any more.
            JobNotFoundError: It was never started.
        """
        with self._database.writing_as(lease) as connection:
            _get(connection, job_id)
            counted = jobs.update().where(jobs.c.job_id == job_id).values(next_number=jobs.c.next_number + 1)
            return int(connection.execute(counted.returning(jobs.c.next_number)).scalar_one()) - 1

    def switch_live_directory(
        self,
        lease: LeaseRecord,
        live_directory: str,
        *,
        origin: StateOrigin | None = None,
        restored_image_id: str | None = None,
        pending_restore: dict[str, Any] | None = None,
        claims: bool = False,
        plan: Mapping[str, Any] | None = None,
    ) -> JobRecord:
        """Make another directory the job's live one; its generation rises.

        Args:
            lease: The lease of the job.
            live_directory: The new directory, which stands ready.
            origin: Where the state in it came from; None where that is not known.
            restored_image_id: The image it was made from: a new timeline begins with it.
            pending_restore: What is still to be done before the query may start. With it, and without an
                image, a new timeline begins with nothing.
            claims: From now on the job owns that image, also where it is a savepoint.
            plan: What the state in the new directory is kept for, empty where that is not known; None: the same as
                in the one before.

        Raises:
            LeaseLostError: The lease is not held any more; nothing was changed.
            CatalogError: A holder before may still live, and nobody has fenced its query off: nobody would find the
                directory that it runs in any more.
        """
        job_id = lease.job_id
        with self._database.writing_under(lease) as connection:
            unfenced = select(leases.c.predecessor_unproven).where(leases.c.job_id == job_id)
            if connection.execute(unfenced).scalar_one():
                raise CatalogError(
                    f"Job {job_id!r} cannot go on elsewhere than in {_get(connection, job_id).live_directory}: a "
                    "holder of its lease may still write there. Fence it off first."
                )
            new_timeline = restored_image_id is not None or pending_restore is not None
            if new_timeline and origin is not None:
                _note_past(connection, job_id, origin)
            connection.execute(
                jobs.update()
                .where(jobs.c.job_id == job_id)
                .values(
                    live_directory=live_directory,
                    live_generation=jobs.c.live_generation + 1,
                    timeline=jobs.c.timeline + int(new_timeline),
                    restored_image_id=restored_image_id if new_timeline else jobs.c.restored_image_id,
                    pending_restore=as_text(pending_restore) if pending_restore is not None else None,
                    plan=as_text(dict(plan)) if plan is not None else jobs.c.plan,
                    origin=as_text(origin.as_record()) if origin is not None else None,
                    updated_at_ms=self._database.now_ms(connection),
                )
            )
            if claims and restored_image_id is not None:
                claimed = (images.c.image_id == restored_image_id) & (images.c.job_id == job_id)
                connection.execute(images.update().where(claimed).values(claimed=True))
            job = _get(connection, job_id)
            self._database.tell(
                connection,
                job_id,
                EventType.RESTORED,
                image_id=restored_image_id,
                payload={"live_directory": live_directory},
            )
            return job

    def _change_under(self, lease: LeaseRecord, **values: str | None) -> None:
        with self._database.writing_under(lease) as connection:
            self._change(connection, lease.job_id, **values)

    def _change(self, connection: Connection, job_id: str, **values: str | None) -> None:
        now_ms = self._database.now_ms(connection)
        connection.execute(jobs.update().where(jobs.c.job_id == job_id).values(**values, updated_at_ms=now_ms))


def raise_counter(connection: Connection, job_id: str, number: int) -> None:
    """Let a job's counter be at a number, in a transaction of its writer; one that is further already stays."""
    behind = (jobs.c.job_id == job_id) & (jobs.c.next_number < number)
    connection.execute(jobs.update().where(behind).values(next_number=number))


def _note_past(connection: Connection, job_id: str, origin: StateOrigin) -> None:
    """Let the timeline that is about to begin know which one it goes on from, and from where."""
    now = connection.execute(select(jobs.c.timeline).where(jobs.c.job_id == job_id)).scalar_one()
    parent = now
    if origin.kind is OriginKind.IMAGE:
        of_image = (images.c.image_id == origin.image_id) & (images.c.job_id == job_id)
        parent = connection.execute(select(images.c.timeline).where(of_image)).scalar_one_or_none()
    if origin.kind not in (OriginKind.IMAGE, OriginKind.DIRECTORY) or parent is None or origin.batch_id is None:
        return
    connection.execute(
        timelines.insert().values(job_id=job_id, timeline=now + 1, parent=parent, to_batch=origin.batch_id)
    )


def _get(connection: Connection, job_id: str) -> JobRecord:
    row = connection.execute(select(jobs).where(jobs.c.job_id == job_id)).one_or_none()
    if row is None:
        known = ", ".join(connection.execute(select(jobs.c.job_id).order_by(jobs.c.job_id)).scalars()) or "none yet"
        raise JobNotFoundError(
            f"The catalog knows no job {job_id!r}: it was never started, or this is another catalog. "
            f"Jobs it knows: {known}."
        )
    unreadable: list[str] = []
    cells(row, jobs, unreadable)
    if unreadable:
        # Without its directory or its timeline a job would look like one that never ran.
        raise CatalogError(
            f"The catalog cannot read its row of job {job_id!r}: {'; '.join(unreadable)}. Bring the catalog back from "
            "a backup, or correct that row of the table jobs."
        )
    job = _record(row)
    if job.pending_restore is None and row.pending_restore is not None:
        # Read as "nothing is pending" it would start the query on sinks that are not rolled back.
        raise CatalogError(
            f"Job {job_id!r} has a restore to finish, and the catalog cannot read which: {job.broken}. Bring the "
            "catalog back from a backup; or, once its sinks are rolled back by hand, set jobs.pending_restore to NULL."
        )
    return job


def _record(row: Row[Any]) -> JobRecord:
    troubles: list[str] = []
    values = cells(row, jobs, troubles)
    values["options"] = read_dict(values["options"], "options", troubles) or {}
    values["pending_restore"] = read_dict(values["pending_restore"], "pending_restore", troubles)
    values["plan"] = read_dict(values["plan"], "plan", troubles)
    values["origin"] = _origin(values["origin"], troubles)
    return JobRecord(**values, broken="; ".join(troubles) or None)


def _origin(value: str | None, troubles: list[str]) -> StateOrigin | None:
    record = read_dict(value, "origin", troubles)
    try:
        return StateOrigin.of_record(record) if record is not None else None
    except ValueError as error:
        troubles.append(f"origin cannot be read: {error}")
        return None
