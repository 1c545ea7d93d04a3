"""Which image to go back to, where a live directory cannot be gone on in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dagster_ckpt.catalog.records import ImageRecord
from dagster_ckpt.stream.snapshot_names import describe_image


@dataclass(frozen=True)
class PassedOver:
    """An image that was not chosen.

    Attributes:
        image: The image.
        why: What is wrong with it.
    """

    image: ImageRecord
    why: str


@dataclass(frozen=True)
class ImageChoice:
    """The image to use.

    Attributes:
        image: The newest one that can be restored, or None.
        replayed_batches: How many committed batches would be processed again; None where that is not known.
        passed_over: Newer ones that cannot be restored.
    """

    image: ImageRecord | None
    replayed_batches: int | None
    passed_over: tuple[PassedOver, ...]

    @property
    def sentence(self) -> str:
        """The choice, for a person."""
        if self.image is None:
            tried = f" ({len(self.passed_over)} were tried)" if self.passed_over else ""
            return f"There is no image of this job that can be restored{tried}."
        replay = "" if self.replayed_batches is None else f"; {self.replayed_batches} batches would be processed again"
        return f"Use {describe_image(self.image)} (start_from={self.image.image_id}){replay}."

    def as_record(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "image_id": self.image.image_id if self.image else None,
            "location": self.image.location if self.image else None,
            "batch_id": self.image.batch_id if self.image else None,
            "replayed_batches": self.replayed_batches,
            "sentence": self.sentence,
            "passed_over": [{"image_id": item.image.image_id, "why": item.why} for item in self.passed_over],
        }


def choose_image(
    images: Sequence[ImageRecord], *, newest_batch: int | None, problems: Callable[[ImageRecord], Sequence[str]]
) -> ImageChoice:
    """Choose the newest image that can be restored.

    Args:
        images: Completed images of the job's timeline.
        newest_batch: The newest batch the query is known to have committed; None where nobody knows. An image of a
            later one belongs to another past of the job.
        problems: What is wrong with an image; asked from the newest on, until one has none.
    """
    passed_over: list[PassedOver] = []
    for image in sorted(images, key=_age, reverse=True):
        if newest_batch is not None and image.batch_id is not None and image.batch_id > newest_batch:
            passed_over.append(PassedOver(image, f"it is of a later batch than {newest_batch}, the newest known"))
            continue
        found = problems(image)
        if found:
            passed_over.append(PassedOver(image, found[0]))
            continue
        replayed = None if newest_batch is None or image.batch_id is None else newest_batch - image.batch_id
        return ImageChoice(image, replayed, tuple(passed_over))
    return ImageChoice(None, None, tuple(passed_over))


def _age(image: ImageRecord) -> tuple[int, int]:
    """Rises with what an image holds; one that does not tell its batch comes before batch 0."""
    return (-1 if image.batch_id is None else image.batch_id, -1 if image.number is None else image.number)
