"""Writing a stored image into the catalog, where the catalog's answer may be lost."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_ckpt.catalog import Catalog, CompletedImage, ImageRecord, ImageStatus, LeaseRecord
from dagster_ckpt.errors import CkptError, LeaseLostError
from dagster_ckpt.lifecycle.batch_log import BatchFigures
from dagster_ckpt.lifecycle.snapshot import Snapshot


@dataclass(frozen=True)
class NotRecorded:
    """An image that the catalog did not take, as far as can be seen.

    Attributes:
        why: What went wrong, for a person.
        is_certain: Whether the catalog says so itself. Only then may the bytes be deleted.
    """

    why: str
    is_certain: bool


def record_image(
    catalog: Catalog, snapshot: Snapshot, figures: BatchFigures, *, duration_ms: int, lease: LeaseRecord | None
) -> ImageRecord | NotRecorded:
    """Record that an image is whole in storage.

    A connection that breaks during a commit leaves open whether it was done. Then the catalog is asked again, by a
    change that only an image which is not completed takes. Where it does not answer, nothing is known, and the bytes
    must stay, as in Flink after a `PossibleInconsistentStateException`.

    Args:
        catalog: The catalog, in which the image is in progress.
        snapshot: The stored image.
        figures: What the batches since the image before did.
        duration_ms: How long the attempt took.
        lease: The lease of the run that took it; None for a savepoint of a job that does not run.

    Raises:
        LeaseLostError: The lease is not held any more. The image is not recorded, and its bytes are not this
            process's to delete.
    """
    images, image_id, stored = catalog.images, snapshot.order.image_id, snapshot.stored
    facts = CompletedImage(
        location=stored.location,
        batch_id=snapshot.batch_id,
        query_id=snapshot.query_id,
        full_bytes=stored.full_bytes,
        incremental_bytes=stored.incremental_bytes,
        file_count=stored.file_count,
        rows=figures.rows,
        state_rows=figures.state_rows,
        watermark=figures.watermark,
        duration_ms=duration_ms,
        properties=dict(snapshot.properties),
    )
    try:
        return images.complete_of_stopped(image_id, facts) if lease is None else images.complete(lease, image_id, facts)
    except LeaseLostError:
        raise
    except CkptError as error:
        why = str(error)
    reason = f"It could not be recorded: {why}"
    try:
        if lease is None:
            images.fail_of_stopped(image_id, reason)
        else:
            images.fail(lease, image_id, reason)
        image = images.get(image_id)
    except LeaseLostError:
        raise
    except CkptError:
        return NotRecorded(f"{why} Its bytes stay at {stored.location}: the catalog may list them.", is_certain=False)
    return image if image.status is ImageStatus.COMPLETED else NotRecorded(why, is_certain=True)
