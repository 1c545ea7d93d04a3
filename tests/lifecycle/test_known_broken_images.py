"""A restart that nobody asked for does not begin with an image that is known to be broken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from retention_shelf import Shelf

from dagster_ckpt.catalog import ImageRecord, StartCause
from dagster_ckpt.errors import KnownBrokenImageError
from dagster_ckpt.lifecycle.execution import refuse_known_broken
from dagster_ckpt.lifecycle.image_verification import ImageVerification, record_verification
from dagster_ckpt.lifecycle.recovery import RecoveryKind, RecoveryPlan

AUTOMATIC = (StartCause.RESTART_IN_PLACE, StartCause.RESTART_NEW_RUN)


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf.at(tmp_path)
    yield shelf
    shelf.job.catalog.close()


def found(shelf: Shelf, image: ImageRecord, *problems: str, deep: bool = True) -> ImageRecord:
    """The image, once a verification has found these problems."""
    record_verification(shelf.job, ImageVerification(image.location or "", None, deep, problems))
    return shelf.job.catalog.images.get(image.image_id)


def restore(image: ImageRecord | None) -> RecoveryPlan:
    kind = RecoveryKind.RESTORE if image is not None else RecoveryKind.RESUME
    return RecoveryPlan(kind, "the live directory is gone", image=image, to_batch=1)


@pytest.mark.parametrize("cause", AUTOMATIC)
def test_an_automatic_restart_from_it_is_refused_and_names_the_others(shelf: Shelf, cause: StartCause) -> None:
    good = shelf.checkpoint()
    broken = found(shelf, shelf.checkpoint(), "data object 1 is truncated")

    with pytest.raises(KnownBrokenImageError, match=r"data object 1 is truncated.*chk-1 at batch 1") as refused:
        refuse_known_broken(shelf.job, restore(broken), cause)
    assert "chk-2" not in str(refused.value).split("Images not known to be broken:")[1]
    refuse_known_broken(shelf.job, restore(good), cause)


def test_a_person_may_try(shelf: Shelf) -> None:
    refuse_known_broken(shelf.job, restore(found(shelf, shelf.checkpoint(), "truncated")), StartCause.MANUAL)


@pytest.mark.parametrize("cause", AUTOMATIC)
def test_a_whole_live_directory_needs_no_image(shelf: Shelf, cause: StartCause) -> None:
    found(shelf, shelf.checkpoint(), "truncated")
    refuse_known_broken(shelf.job, restore(None), cause)


def test_only_a_comparison_of_every_byte_takes_back_what_was_found(shelf: Shelf) -> None:
    image = shelf.checkpoint()
    assert found(shelf, image, "truncated").verified_problem == "truncated"
    assert found(shelf, image, deep=False).verified_problem == "truncated"
    assert found(shelf, image).verified_problem is None
