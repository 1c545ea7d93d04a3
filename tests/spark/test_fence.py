"""A fenced live directory: no batch is planned in it any more, and every reader knows why."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_files import LiveFiles

from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory, retained_batches
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.planned_batches import Fence, fence
from dagster_ckpt.spark.checkpoint_dir.restore import clone
from dagster_ckpt.spark.doctor.diagnosis import diagnose
from dagster_ckpt.spark.doctor.finding import Code, Severity

LAST = 4


class Stopped(Exception):  # noqa: N818 - not an error of anybody's
    """The one who fences ends here."""


@pytest.fixture
def files(tmp_path: Path) -> LiveFiles:
    files = LiveFiles(tmp_path / "live-1")
    files.batches(LAST)
    return files


def put_up(
    files: LiveFiles,
    *,
    wait_s: float = 0.0,
    still_mine: Callable[[], None] = lambda: None,
    sleep: Callable[[float], None] = lambda _seconds: None,
) -> Fence:
    return fence(files.live.folder, by="a test", wait_s=wait_s, still_mine=still_mine, sleep=sleep)


def plan(files: LiveFiles, batch: int) -> None:
    """As Spark does: whole, or not at all; it has looked before whether an entry is there."""
    files.source_entry(str(batch))
    files.offsets(batch, f'{{"logOffset":{batch}}}')


def nth(number: int, do: Callable[[], None]) -> Callable[..., None]:
    """Something that happens at one call of many."""
    calls = iter(range(number))

    def call(*_: object) -> None:
        if next(calls, None) == number - 1:
            do()

    return call


def test_the_next_batch_cannot_be_planned_and_is_not_shown_as_planned(files: LiveFiles) -> None:
    before = files.live.positions()

    assert put_up(files) == Fence(LAST + 1, None)

    assert (files.root / f"offsets/{LAST + 1}").exists()
    assert files.live.fenced_at() == LAST + 1
    assert files.live.positions() == before
    assert retained_batches(files.live)[-1] == LAST
    state = inspect_live_directory(files.live)
    assert (state.status, state.batch_id, state.in_flight, state.fenced_at) == (LiveStatus.GOOD, LAST, None, LAST + 1)
    assert cut(files.live, carry_in_flight=True).in_flight is None


def test_it_may_be_put_up_again(files: LiveFiles) -> None:
    assert put_up(files) == put_up(files)


def test_the_doctor_tells_of_it_and_finds_nothing_wrong(files: LiveFiles) -> None:
    put_up(files)

    diagnosis = diagnose(files.live)

    assert diagnosis.in_flight is None
    assert [(found.code, found.severity) for found in diagnosis.findings] == [(Code.FENCED, Severity.NOTE)]
    assert f"ended at batch {LAST}" in diagnosis.findings[0].explanation


def test_a_query_goes_on_from_it_elsewhere_without_a_fence(files: LiveFiles, tmp_path: Path) -> None:
    plan(files, LAST + 1)
    put_up(files)
    successor = LiveDirectory(str(tmp_path / "live-2"))

    clone(files.live, successor)

    state = inspect_live_directory(successor)
    assert (state.batch_id, state.in_flight, state.fenced_at) == (LAST, LAST + 1, None)
    assert not [path for path in (tmp_path / "live-2/offsets").iterdir() if not path.name.isdecimal()]


def test_a_batch_in_flight_is_waited_for(files: LiveFiles) -> None:
    plan(files, LAST + 1)

    # The first sleep lets a writer that has looked already write; the others wait for the commit.
    done = put_up(files, wait_s=60, sleep=nth(3, lambda: files.commit(LAST + 1)))

    assert done == Fence(LAST + 2, None)
    assert inspect_live_directory(files.live).batch_id == LAST + 1


def test_one_that_is_not_committed_is_told_of(files: LiveFiles) -> None:
    plan(files, LAST + 1)

    assert put_up(files, wait_s=1) == Fence(LAST + 2, LAST + 1)


def test_where_the_query_was_faster_the_batch_after_is_fenced(files: LiveFiles) -> None:
    # Called before the mark, and again right before the entry.
    done = put_up(files, still_mine=nth(2, lambda: plan(files, LAST + 1)))

    assert done == Fence(LAST + 2, LAST + 1)
    assert files.live.positions().offset == LAST + 1


def test_an_entry_that_takes_the_place_of_the_fence_is_found(files: LiveFiles) -> None:
    done = put_up(files, sleep=nth(1, lambda: plan(files, LAST + 1)))

    assert done == Fence(LAST + 2, LAST + 1)
    assert files.live.positions().offset == LAST + 1


@pytest.mark.parametrize("step", [1, 2, 3])
def test_cut_off_anywhere_it_leaves_a_directory_to_go_on_from(files: LiveFiles, step: int) -> None:
    def stop() -> None:
        raise Stopped

    plan(files, LAST + 1)
    with contextlib.suppress(Stopped):
        put_up(files, wait_s=1, still_mine=nth(step, stop))

    state = inspect_live_directory(files.live)
    assert (state.status, state.batch_id, state.in_flight) == (LiveStatus.GOOD, LAST, LAST + 1)
    assert put_up(files) == Fence(LAST + 2, LAST + 1)


def test_an_entry_that_was_cut_off_while_it_was_written_is_a_fence(files: LiveFiles) -> None:
    put_up(files)
    files.put(f"offsets/{LAST + 1}", b"")

    assert files.live.fenced_at() == LAST + 1
    assert put_up(files).batch_id == LAST + 1


def test_a_directory_without_a_batch_is_fenced_before_the_first(tmp_path: Path) -> None:
    files = LiveFiles(tmp_path / "live-1")
    files.query_id()

    assert put_up(files) == Fence(0, None)

    state = inspect_live_directory(files.live)
    assert (state.status, state.fenced_at) == (LiveStatus.EMPTY, 0)


def test_a_live_directory_in_object_storage_is_fenced_as_well(files: LiveFiles, s3_options: dict[str, Any]) -> None:
    import s3fs

    bucket = f"fence-{uuid.uuid4()}"
    s3 = s3fs.S3FileSystem(**s3_options)
    s3.mkdir(bucket)
    s3.put(str(files.root), f"{bucket}/live-1", recursive=True)
    live = LiveDirectory(f"s3://{bucket}/live-1", s3_options)

    done = fence(live.folder, by="a test", wait_s=0, sleep=lambda _seconds: None)

    assert done == Fence(LAST + 1, None)
    assert live.fenced_at() == LAST + 1
    assert inspect_live_directory(live).fenced_at == LAST + 1
    live.folder.create_if_absent(f"offsets/{LAST}", b"another entry")
    assert live.folder.read(f"offsets/{LAST}").startswith(b"v1")
