"""What an image is called, and what it is to the rules of retention and recovery."""

from __future__ import annotations

from collections.abc import Sequence

from dagster_ckpt.catalog.records import ImageRecord, ImageTrigger
from dagster_ckpt.policies.retention import Retained, RetainedKind, image_to_recover_from

CHECKPOINT = "CHECKPOINT"
SAVEPOINT = "SAVEPOINT"


def newest_for_recovery(images: Sequence[ImageRecord], *, prefer_checkpoint: bool) -> ImageRecord | None:
    """The image that an automatic recovery takes.

    The newest one; with `prefer_checkpoint` the newest checkpoint if there is any
    (Flink's CompletedCheckpointStore.getLatestCheckpoint before FLINK-20427).

    Args:
        images: Restorable images, newest first.
        prefer_checkpoint: Skip savepoints where a checkpoint exists.
    """
    oldest_first = [Retained(image.image_id, retained_kind(image)) for image in reversed(images)]
    chosen = image_to_recover_from(oldest_first, prefer_checkpoint=prefer_checkpoint)
    return next((image for image in images if chosen is not None and image.image_id == chosen.image_id), None)


def retained_kind(image: ImageRecord) -> RetainedKind:
    """What an image is to the rules of retention and recovery."""
    if is_owned_by_job(image):
        return RetainedKind.CHECKPOINT
    return RetainedKind.STOP_WITH_SAVEPOINT if image.trigger is ImageTrigger.STOP else RetainedKind.SAVEPOINT


def is_owned_by_job(image: ImageRecord) -> bool:
    """Whether the job deletes an image itself: a checkpoint, or a savepoint that a start has claimed."""
    return image.kind == CHECKPOINT or image.claimed


def describe_image(image: ImageRecord) -> str:
    """One image in a few words: what a person calls it and the batch it stands at."""
    name = f"chk-{image.number}" if image.kind == CHECKPOINT else f"savepoint {image.label or image.image_id}"
    return f"{name} at batch {image.batch_id}"


def is_named(image: ImageRecord, reference: str) -> bool:
    """Whether a reference is the id, label, location or, of a checkpoint, the `chk-<n>` of an image."""
    location = (image.location or "").rstrip("/")
    plain = reference.rstrip("/").removesuffix("/_metadata")
    names = {image.image_id, location, location.removeprefix("file://"), image.label}
    if image.kind == CHECKPOINT:
        names.add(f"chk-{image.number}")
    return plain in names
