"""What a process that died left between storage and catalog is settled: registered, failed or deleted."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from retention_shelf import JOB, Shelf

from dagster_ckpt.catalog.records import ImageRecord, ImageStatus, ImageTrigger
from dagster_ckpt.catalog.tables import images
from dagster_ckpt.errors import LeaseLostError
from dagster_ckpt.recovery.dead_attempts import settle_dead_attempts
from dagster_ckpt.recovery.retention import housekeeping
from dagster_ckpt.stream.holding import HOLD_TTL_MS
from dagster_ckpt.stream.holding import holding as holding_images
from tests.as_writer import as_writer, holding


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf.at(tmp_path)


def status(shelf: Shelf, image: ImageRecord) -> ImageStatus:
    return shelf.job.catalog.images.get(image.image_id).status


def forget(shelf: Shelf, image: ImageRecord, as_status: ImageStatus = ImageStatus.IN_PROGRESS) -> None:
    """The catalog, as it is where the process died before it recorded the image."""
    with shelf.job.catalog.database.writing() as connection:
        this = images.c.image_id == image.image_id
        values = {"location": None, "batch_id": None, "completed_at_ms": None, "properties": "{}"}
        connection.execute(images.update().where(this).values(status=as_status.value, **values))


def begun(shelf: Shelf, number: int) -> ImageRecord:
    record: ImageRecord = as_writer(shelf.job.catalog, JOB).images.begin(
        image_id=f"dead-{number}", execution_id="first", kind="CHECKPOINT", number=number,
        trigger=ImageTrigger.PERIODIC, timeline=0,
    )  # fmt: skip
    return record


@pytest.mark.parametrize("by", ["start", "housekeeping"])
def test_an_image_that_is_whole_in_storage_is_registered(shelf: Shelf, by: str) -> None:
    """f28 and known defect 14: a whole checkpoint stayed IN_PROGRESS, and nothing listed or removed it."""
    shelf.checkpoint()
    newest = shelf.checkpoint()
    mine = shelf.savepoint("mine")
    forget(shelf, newest)
    forget(shelf, mine)

    if by == "start":
        with holding(shelf.job.catalog, JOB) as lease:
            done = settle_dead_attempts(shelf.job, lease)
    else:
        done = housekeeping(shelf.job).sentences()

    assert [sentence.split(":")[0] for sentence in done] == [
        "registered savepoint mine at batch 3",
        "registered chk-2 at batch 2",
    ]
    registered = shelf.job.catalog.images.get(newest.image_id)
    assert (registered.status, registered.location) == (ImageStatus.COMPLETED, newest.location)
    assert registered.image_id in {each.image_id for each in shelf.job.catalog.images.restorable(JOB)}
    assert status(shelf, mine) is ImageStatus.COMPLETED


@pytest.mark.parametrize("damage", ["no metadata", "truncated object"])
def test_an_attempt_that_is_not_whole_has_failed(shelf: Shelf, damage: str) -> None:
    image = shelf.checkpoint()
    folder = Path((image.location or "").removeprefix("file://"))
    if damage == "no metadata":
        (folder / "_metadata").unlink()
    else:
        objects = [path for path in folder.parent.rglob("*") if path.is_file() and path.name != "_metadata"]
        objects[0].write_bytes(b"")
    forget(shelf, image)

    with holding(shelf.job.catalog, JOB) as lease:
        assert settle_dead_attempts(shelf.job, lease) == ["chk-1 was not completed: its process died"]

    assert status(shelf, image) is ImageStatus.FAILED


def test_what_has_the_number_of_another_attempt_is_not_taken_for_it(shelf: Shelf) -> None:
    shelf.checkpoint()
    dead = begun(shelf, 1)

    with holding(shelf.job.catalog, JOB) as lease:
        settle_dead_attempts(shelf.job, lease)

    assert status(shelf, dead) is ImageStatus.FAILED


def test_who_has_lost_the_lease_settles_nothing(shelf: Shelf) -> None:
    image = shelf.checkpoint()
    forget(shelf, image)
    with holding(shelf.job.catalog, JOB) as lease:
        pass

    with pytest.raises(LeaseLostError):
        settle_dead_attempts(shelf.job, lease)

    assert status(shelf, image) is ImageStatus.IN_PROGRESS


def test_while_the_stream_runs_housekeeping_leaves_attempts_under_way_alone(shelf: Shelf) -> None:
    with holding(shelf.job.catalog, JOB):
        under_way = begun(shelf, 7)

        assert housekeeping(shelf.job).settled == ()

    assert status(shelf, under_way) is ImageStatus.IN_PROGRESS


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("state", ["young", "held", "killed"])
def test_a_savepoint_of_a_stopped_stream_whose_process_was_killed_is_settled(
    shelf: Shelf, state: str, is_whole: bool
) -> None:
    taken = shelf.savepoint("by hand")
    forget(shelf, taken)
    with shelf.job.catalog.database.writing() as connection:
        began_ms = taken.created_at_ms - (0 if state == "young" else 2 * HOLD_TTL_MS)
        this = images.c.image_id == taken.image_id
        connection.execute(images.update().where(this).values(execution_id=None, created_at_ms=began_ms))
    if not is_whole:
        (Path((taken.location or "").removeprefix("file://")) / "_metadata").unlink()

    with ExitStack() as process:
        if state == "held":
            attempt = shelf.job.catalog.images.get(taken.image_id)
            process.enter_context(holding_images(shelf.job.catalog, [attempt], "savepoint"))
        housekeeping(shelf.job)

    settled = ImageStatus.COMPLETED if is_whole else ImageStatus.FAILED
    assert status(shelf, taken) is (settled if state == "killed" else ImageStatus.IN_PROGRESS)


def test_what_became_whole_after_its_attempt_had_failed_is_deleted_and_nothing_else(shelf: Shelf) -> None:
    kept = shelf.checkpoint()
    late = shelf.checkpoint(base=kept)
    forget(shelf, late, as_status=ImageStatus.FAILED)
    unknown = shelf.checkpoint()
    with shelf.job.catalog.database.writing() as connection:
        connection.execute(images.delete().where(images.c.image_id == unknown.image_id))

    done = housekeeping(shelf.job).settled

    assert len(done) == 1
    assert done[0].startswith("deleted chk-2 at ")
    assert shelf.job.store.checkpoints() == [kept.location, unknown.location]
    assert shelf.job.store.verify(kept.location or "") == []
