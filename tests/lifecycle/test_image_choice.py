"""Which image to go back to, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dagster_ckpt.catalog.records import ImageRecord, ImageStatus, ImageTrigger
from dagster_ckpt.recovery.snapshot_choice import ImageChoice, choose_image


def image(batch: int | None, number: int | None = None) -> ImageRecord:
    number = batch if number is None else number
    return ImageRecord(
        image_id=f"image-{number}",
        job_id="orders",
        execution_id=None,
        kind="CHECKPOINT",
        number=number,
        status=ImageStatus.COMPLETED,
        trigger=ImageTrigger.PERIODIC,
        timeline=0,
        location=f"/images/chk-{number}",
        batch_id=batch,
    )


def chosen(images: Sequence[ImageRecord], newest: int | None, broken: Sequence[str] = ()) -> ImageChoice:
    def problems(candidate: ImageRecord) -> list[str]:
        return ["it is torn", "and more"] if candidate.image_id in broken else []

    return choose_image(images, newest_batch=newest, problems=problems)


@pytest.mark.parametrize(
    ("batches", "newest", "broken", "takes"),
    [
        # What is taken: the batch, how many are replayed, and the batches of newer images that are passed over.
        ([3, 9, 6], 10, [], (9, 1, [])),
        ([3, 9, 6], 9, [], (9, 0, [])),
        ([3, 9, 6], 10, ["image-9"], (6, 4, [9])),
        ([3, 9, 6], 7, [], (6, 1, [9])),
        ([3, 9, 6], 7, ["image-6"], (3, 4, [9, 6])),
        ([3, 9, 6], None, [], (9, None, [])),
        ([3, 9], 10, ["image-3", "image-9"], (None, None, [9, 3])),
        ([0, 1], 1, ["image-1"], (0, 1, [1])),
        ([], 10, [], (None, None, [])),
    ],
)
def test_the_newest_image_that_passes_is_chosen(
    batches: list[int], newest: int | None, broken: list[str], takes: tuple[int | None, int | None, list[int]]
) -> None:
    choice = chosen([image(batch) for batch in batches], newest, broken)

    passed_over = [item.image.batch_id for item in choice.passed_over]
    assert (choice.image and choice.image.batch_id, choice.replayed_batches, passed_over) == takes


def test_of_two_images_of_one_batch_the_later_is_taken() -> None:
    assert chosen([image(4, 1), image(4, 2)], 9).image == image(4, 2)


def test_an_image_that_does_not_tell_its_batch_or_number_comes_last() -> None:
    unknown = image(None, 8)
    nameless = ImageRecord(**{**vars(image(0, 1)), "image_id": "nameless", "number": None})

    assert chosen([unknown, nameless, image(0, 0)], 9).image == image(0, 0)
    assert chosen([unknown, nameless], 9).image == nameless
    only = chosen([unknown], 9)
    assert (only.image, only.replayed_batches) == (unknown, None)


def test_the_choice_is_told_in_words_and_as_plain_data() -> None:
    found = chosen([image(9), image(6), image(5)], 8, ["image-6"])
    words = "Use chk-5 at batch 5 (start_from=image-5); 3 batches would be processed again."
    assert found.sentence == words
    record: dict[str, Any] = {
        "image_id": "image-5",
        "location": "/images/chk-5",
        "batch_id": 5,
        "replayed_batches": 3,
        "sentence": words,
        "passed_over": [
            {"image_id": "image-9", "why": "it is of a later batch than 8, the newest known"},
            {"image_id": "image-6", "why": "it is torn"},
        ],
    }
    assert found.as_record() == record


def test_where_the_newest_batch_is_not_known_nothing_is_said_of_repetition() -> None:
    assert chosen([image(9)], None).sentence == "Use chk-9 at batch 9 (start_from=image-9)."


def test_where_no_image_can_be_restored_it_says_how_many_were_tried() -> None:
    none = {"image_id": None, "location": None, "batch_id": None, "replayed_batches": None}
    nothing = "There is no image of this job that can be restored."
    assert chosen([], 9).as_record() == {**none, "sentence": nothing, "passed_over": []}
    tried = chosen([image(3)], 9, ["image-3"])
    assert tried.sentence == "There is no image of this job that can be restored (1 were tried)."
