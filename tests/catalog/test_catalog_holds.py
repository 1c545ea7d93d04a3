from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from conftest import ManualClock
from sqlalchemy import text

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import HoldKind, ImageRecord, ImageStatus, ImageTrigger, RequestKind, RequestStatus
from dagster_ckpt.errors import ImageHeldError, ImageNotFoundError
from tests.as_writer import as_writer


@pytest.fixture
def image(catalog: Catalog) -> ImageRecord:
    return completed(catalog, 1)


def completed(catalog: Catalog, number: int) -> ImageRecord:
    image_id = f"image-{number}"
    writer = as_writer(catalog)
    writer.images.begin(
        image_id=image_id,
        execution_id="execution",
        kind="CHECKPOINT",
        number=number,
        trigger=ImageTrigger.PERIODIC,
        timeline=0,
    )
    made = writer.complete(image_id, location=f"file:///images/chk-{number}", batch_id=number)
    assert isinstance(made, ImageRecord)
    return made


def is_deletable(catalog: Catalog, image: ImageRecord) -> bool:
    try:
        catalog.images.mark_deleting(image.image_id, lease=None)
    except ImageHeldError:
        return False
    return True


def test_an_image_in_use_is_not_deleted_until_its_reader_lets_go(catalog: Catalog, image: ImageRecord) -> None:
    [hold] = catalog.holds.use([image], holder="verification", ttl_ms=1_000)

    with pytest.raises(ImageHeldError, match=r"image-1 of job 'orders' is held \(use by verification\)") as refused:
        catalog.images.mark_deleting(image.image_id, lease=None)
    assert refused.value.passes
    assert catalog.images.get(image.image_id).status is ImageStatus.COMPLETED

    catalog.holds.release([hold.hold_id])
    assert is_deletable(catalog, image)


def test_the_hold_of_a_reader_that_died_runs_out_on_the_databases_clock(
    catalog: Catalog, image: ImageRecord, clock: ManualClock
) -> None:
    [hold] = catalog.holds.use([image], holder="a reader", ttl_ms=1_000)
    clock.now_ms += 900
    assert catalog.holds.renew([hold.hold_id], 1_000)
    clock.now_ms += 900
    assert not is_deletable(catalog, image)
    clock.now_ms += 200
    assert catalog.holds.on(image.image_id) == []
    assert is_deletable(catalog, image)


def test_what_ran_out_is_forgotten_by_the_next_reader_and_not_renewed(
    catalog: Catalog, image: ImageRecord, clock: ManualClock
) -> None:
    [dead] = catalog.holds.use([image], holder="dead", ttl_ms=1)
    clock.now_ms += 1
    catalog.holds.use([image], holder="alive", ttl_ms=1_000)

    assert not catalog.holds.renew([dead.hold_id], 1_000)
    assert [hold.holder for hold in catalog.holds.on(image.image_id)] == ["alive"]


@pytest.mark.parametrize("status", [ImageStatus.DELETING, ImageStatus.DELETED])
def test_a_reader_that_comes_too_late_is_told_so_with_what_there_is(
    catalog: Catalog, image: ImageRecord, status: ImageStatus
) -> None:
    completed(catalog, 2)
    catalog.images.mark_deleting(image.image_id, lease=None)
    if status is ImageStatus.DELETED:
        catalog.images.deleted(image.image_id, "subsumed", lease=None)

    with pytest.raises(ImageNotFoundError, match=rf"chk-1 of job 'orders'.* is {status.value} since .*has now: chk-2"):
        catalog.holds.use([image], holder="late", ttl_ms=1_000)


def test_an_image_that_the_catalog_does_not_list_there_needs_no_hold(catalog: Catalog, image: ImageRecord) -> None:
    copied = replace(image, location="file:///elsewhere/chk-1")
    unknown = replace(image, image_id="of another catalog")

    assert catalog.holds.use([copied, unknown], holder="a reader", ttl_ms=1_000) == []
    assert is_deletable(catalog, image)


def test_a_tag_keeps_an_image_until_it_is_released(catalog: Catalog, image: ImageRecord, clock: ManualClock) -> None:
    catalog.holds.tag(image.image_id, label="first", holder="a person")
    catalog.holds.tag(image.image_id, label="before-release", holder="a person")
    clock.now_ms += 10**12

    with pytest.raises(ImageHeldError) as refused:
        catalog.images.mark_deleting(image.image_id, lease=None)
    assert not refused.value.passes
    assert catalog.holds.tagged("orders") == {image.image_id}
    assert [hold.kind for hold in catalog.holds.on(image.image_id)] == [HoldKind.TAG]
    assert catalog.images.get(image.image_id).label == "before-release"

    assert catalog.holds.release_tag(image.image_id)
    assert not catalog.holds.release_tag(image.image_id)
    assert catalog.images.get(image.image_id).label is None
    assert is_deletable(catalog, image)
    with pytest.raises(ImageNotFoundError):
        catalog.holds.tag(image.image_id, label=None, holder="too late")


@pytest.mark.parametrize("end", [RequestStatus.COMPLETED, RequestStatus.FAILED, None])
def test_a_start_that_is_asked_for_holds_its_image_until_it_is_answered(
    catalog: Catalog, image: ImageRecord, clock: ManualClock, end: RequestStatus | None
) -> None:
    request = catalog.requests.submit("orders", RequestKind.START, origin="a person", holding=image.image_id)
    clock.now_ms += 10**12
    assert not is_deletable(catalog, image)
    as_writer(catalog).requests.accept(request.request_id)
    assert not is_deletable(catalog, image)

    if end is None:
        catalog.requests.withdraw(request.request_id)
    else:
        as_writer(catalog).requests.resolve(request.request_id, end)
    assert is_deletable(catalog, image)


def test_a_start_from_an_image_that_is_being_deleted_is_not_asked_for(catalog: Catalog, image: ImageRecord) -> None:
    catalog.images.mark_deleting(image.image_id, lease=None)
    with pytest.raises(ImageNotFoundError, match="is DELETING"):
        catalog.requests.submit("orders", RequestKind.START, origin="late", request_id="r", holding=image.image_id)
    assert catalog.requests.find("r") is None


@pytest.mark.parametrize("names_it", ["location", "image_id"])
def test_a_restore_or_a_fork_that_is_not_finished_holds_what_it_began_with(
    catalog: Catalog, image: ImageRecord, names_it: str
) -> None:
    catalog.jobs.ensure("fork", name="fork", asset_key="fork", options={})
    pending = {"location": image.location} if names_it == "location" else {"image_id": image.image_id}
    as_writer(catalog, "fork").jobs.switch_live_directory("file:///live-1", pending_restore=pending)
    assert not is_deletable(catalog, image)

    as_writer(catalog, "fork").jobs.restore_finished()
    assert is_deletable(catalog, image)


def test_an_upgrade_holds_what_it_would_be_rolled_back_to(catalog: Catalog, image: ImageRecord) -> None:
    catalog.desired_states.ensure("orders", origin="a test")

    def upgrade(phase: str) -> None:
        with catalog.database.writing() as connection:
            stored = f'{{"image_id":"{image.image_id}","phase":"{phase}"}}'
            connection.execute(text("UPDATE desired_states SET upgrade = :stored"), {"stored": stored})

    upgrade("UPGRADING")
    assert not is_deletable(catalog, image)
    upgrade("STABLE")
    assert is_deletable(catalog, image)


def test_of_a_reader_and_a_deletion_at_the_same_moment_one_is_first(url: str, catalog: Catalog) -> None:
    """The reader has its hold and the image stays, or it is told that the image is gone. Nothing between."""
    other = Catalog(url)
    for number in range(1, 21):
        image = completed(catalog, number)
        begin = threading.Barrier(2)
        found: dict[str, bool] = {}

        def read(image: ImageRecord = image, begin: threading.Barrier = begin, found: dict[str, bool] = found) -> None:
            begin.wait()
            try:
                found["held"] = bool(other.holds.use([image], holder="a reader", ttl_ms=10**12))
            except ImageNotFoundError:
                found["held"] = False

        reader = threading.Thread(target=read)
        reader.start()
        begin.wait()
        deleted = is_deletable(catalog, image)
        reader.join()
        assert found["held"] is not deleted
    other.close()
