"""Holds: what keeps an image from being deleted while somebody needs it.

A hold and the mark that an image is being deleted are each made while the image's row is locked, so one of the two is
there first: a reader that has its hold never loses a byte, and one that comes too late is told so before it reads.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, Row, and_, exists, or_, select

from dagster_ckpt.catalog.database import Database, optional_dict
from dagster_ckpt.catalog.desired_states import UpgradePhase
from dagster_ckpt.catalog.records import HoldKind, HoldRecord, ImageRecord, ImageStatus, LeaseRecord, RequestStatus
from dagster_ckpt.catalog.tables import desired_states, holds, images, jobs, requests
from dagster_ckpt.errors import ImageNotFoundError

_CHECKPOINT = "CHECKPOINT"
_THERE = (ImageStatus.COMPLETED.value, ImageStatus.IN_PROGRESS.value)
_UPGRADE_IS_OVER = frozenset(phase.value for phase in UpgradePhase if phase.is_over)
_OPEN = (RequestStatus.PENDING.value, RequestStatus.ACCEPTED.value)


class HoldStore:
    """What holds images, by the database's clock."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def use(self, wanted: Sequence[ImageRecord], *, holder: str, ttl_ms: int) -> list[HoldRecord]:
        """Hold images while they are read; the holds run out unless they are renewed.

        Args:
            wanted: The images. One that the catalog does not list at this place is left out: nothing deletes it.
            holder: Who reads, for a person.
            ttl_ms: How long the holds last without a renewal.

        Raises:
            ImageNotFoundError: One of them has been deleted, or is being deleted.
        """
        with self._database.writing() as connection:
            now_ms = self._database.now_ms(connection)
            run_out = (holds.c.kind == HoldKind.USE.value) & (holds.c.expires_at_ms <= now_ms)
            connection.execute(holds.delete().where(run_out))
            made = []
            for image in wanted:
                row = lock_image(connection, image.image_id)
                if row is not None and (row.location is None or row.location == image.location):
                    _refuse_if_gone(connection, row)
                    expires_at_ms = now_ms + ttl_ms
                    made.append(_insert(connection, row, HoldKind.USE, holder, now_ms, expires_at_ms=expires_at_ms))
            return made

    def renew(self, hold_ids: Sequence[str], ttl_ms: int) -> bool:
        """Let holds last again; False where one of them had run out and is gone."""
        with self._database.writing() as connection:
            expires_at_ms = self._database.now_ms(connection) + ttl_ms
            renewed = holds.update().where(holds.c.hold_id.in_(hold_ids)).values(expires_at_ms=expires_at_ms)
            return connection.execute(renewed).rowcount == len(hold_ids)

    def release(self, hold_ids: Sequence[str]) -> None:
        """End holds; one that is gone is no error."""
        with self._database.writing() as connection:
            connection.execute(holds.delete().where(holds.c.hold_id.in_(hold_ids)))

    def tag(self, image_id: str, *, label: str | None, holder: str, lease: LeaseRecord | None = None) -> HoldRecord:
        """Keep an image until its tag is released; with a label it can be started from by that name.

        Args:
            image_id: The image.
            label: The label, if it gets one.
            holder: Who keeps it, for a person to read.
            lease: The lease of the job, where its run does that.

        Raises:
            LeaseLostError: The lease is not held any more.
            ImageNotFoundError: There is none of this id, or it is being deleted.
        """
        with self._database.writing_as(lease) as connection:
            row = lock_image(connection, image_id)
            if row is None or row.status != ImageStatus.COMPLETED.value:
                raise ImageNotFoundError(gone(connection, row.job_id, image_id) if row else _unknown(image_id))
            connection.execute(holds.delete().where(_tags(image_id)))
            if label is not None:
                connection.execute(images.update().where(images.c.image_id == image_id).values(label=label))
            return _insert(connection, row, HoldKind.TAG, holder, self._database.now_ms(connection))

    def release_tag(self, image_id: str) -> bool:
        """Take a tag, and the label of a checkpoint, back; False where there was none."""
        with self._database.writing() as connection:
            lock_image(connection, image_id)
            if not connection.execute(holds.delete().where(_tags(image_id))).rowcount:
                return False
            checkpoint = (images.c.image_id == image_id) & (images.c.kind == _CHECKPOINT)
            connection.execute(images.update().where(checkpoint).values(label=None))
            return True

    def tagged(self, job_id: str) -> frozenset[str]:
        """Ids of the images of a job that are tagged."""
        query = select(holds.c.image_id).where(holds.c.job_id == job_id, holds.c.kind == HoldKind.TAG.value)
        with self._database.reading() as connection:
            return frozenset(connection.execute(query).scalars())

    def on(self, image_id: str) -> list[HoldRecord]:
        """What holds an image now."""
        with self._database.reading() as connection:
            row = connection.execute(select(images).where(images.c.image_id == image_id)).one_or_none()
            return list(standing(connection, row, self._database.now_ms(connection))) if row is not None else []


def lock_image(connection: Connection, image_id: str) -> Row[Any] | None:
    """The row of an image, which on PostgreSQL is ours to the commit; on SQLite everything is, from the begin."""
    return connection.execute(select(images).where(images.c.image_id == image_id).with_for_update()).one_or_none()


def refer(connection: Connection, image_id: str, *, request_id: str, now_ms: int) -> None:
    """Hold an image in the transaction that makes a request, as long as that is not answered.

    Raises:
        ImageNotFoundError: It has been deleted, or is being deleted.
    """
    row = lock_image(connection, image_id)
    if row is not None:
        _refuse_if_gone(connection, row)
        _insert(connection, row, HoldKind.REFERENCE, f"request {request_id}", now_ms, request_id=request_id)


def standing(connection: Connection, image: Row[Any], now_ms: int) -> Iterator[HoldRecord]:
    """What holds an image, in the transaction of who asks: the recorded holds, and what other tables refer to."""
    is_open = exists().where(requests.c.request_id == holds.c.request_id, requests.c.status.in_(_OPEN))
    stands = or_(
        holds.c.kind == HoldKind.TAG.value,
        and_(holds.c.kind == HoldKind.USE.value, holds.c.expires_at_ms > now_ms),
        and_(holds.c.kind == HoldKind.REFERENCE.value, is_open),
    )
    for row in connection.execute(select(holds).where(holds.c.image_id == image.image_id, stands)):
        yield HoldRecord(**{**row._mapping, "kind": HoldKind(row.kind)})
    for holder in _referring(connection, image):
        yield HoldRecord("", image.image_id, image.job_id, HoldKind.REFERENCE, holder, None, None, now_ms)


def _referring(connection: Connection, image: Row[Any]) -> Iterator[str]:
    pending = select(jobs.c.job_id, jobs.c.pending_restore).where(jobs.c.pending_restore.is_not(None))
    for row in connection.execute(pending):
        restore = optional_dict(row.pending_restore) or {}
        is_place = image.location is not None and restore.get("location") == image.location
        if is_place or restore.get("image_id") == image.image_id:
            yield f"a start of job {row.job_id} that is not finished"
    upgrades = select(desired_states.c.upgrade).where(desired_states.c.job_id == image.job_id)
    upgrade = optional_dict(connection.execute(upgrades).scalar_one_or_none()) or {}
    if upgrade.get("image_id") == image.image_id and upgrade.get("phase") not in _UPGRADE_IS_OVER:
        yield "an upgrade that is not over may be rolled back to it"


def gone(connection: Connection, job_id: str, image_id: str) -> str:
    """What a reader is told of an image that it comes too late for."""
    row = connection.execute(select(images).where(images.c.image_id == image_id)).one()
    name = f"chk-{row.number}" if row.kind == _CHECKPOINT else f"savepoint {row.label or image_id}"
    there = select(images.c.number, images.c.kind, images.c.label, images.c.image_id).where(
        images.c.job_id == job_id, images.c.status == ImageStatus.COMPLETED.value
    )
    newest = connection.execute(there.order_by(images.c.number.desc()).limit(8)).all()
    known = ", ".join(
        f"chk-{each.number}" if each.kind == _CHECKPOINT else str(each.label or each.image_id) for each in newest
    )
    return (
        f"{name} of job {job_id!r} (image {image_id}) is {row.status} since it was listed: newer images took its "
        f"place, or somebody deleted it. It was whole until then. The job has now: {known or 'no image'}. Name one of "
        "these, or tag a checkpoint to keep it."
    )


def _refuse_if_gone(connection: Connection, row: Row[Any]) -> None:
    if row.status not in _THERE:
        raise ImageNotFoundError(gone(connection, row.job_id, row.image_id))


def _insert(
    connection: Connection,
    image: Row[Any],
    kind: HoldKind,
    holder: str,
    now_ms: int,
    *,
    request_id: str | None = None,
    expires_at_ms: int | None = None,
) -> HoldRecord:
    hold = HoldRecord(str(uuid.uuid4()), image.image_id, image.job_id, kind, holder, request_id, expires_at_ms, now_ms)
    connection.execute(holds.insert().values(**{**vars(hold), "kind": kind.value}))
    return hold


def _tags(image_id: str) -> Any:
    return (holds.c.image_id == image_id) & (holds.c.kind == HoldKind.TAG.value)


def _unknown(image_id: str) -> str:
    return f"The catalog knows no image {image_id!r}. List the job's images for one it knows."
