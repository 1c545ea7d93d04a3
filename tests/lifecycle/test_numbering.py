"""Numbers of images rise above all that is stored, also where the catalog has forgotten it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from retention_shelf import JOB, Shelf

from dagster_ckpt.catalog.records import ImageRecord
from dagster_ckpt.checkpointing.numbering import count_beyond_what_is_used
from dagster_ckpt.runtime.execution import RunRequest, run_job
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.handle import StreamingJob
from tests.as_writer import holding, set_job


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf.at(tmp_path)
    yield shelf
    shelf.job.catalog.close()


def forgotten(shelf: Shelf) -> Shelf:
    """The same storage and live directory, and a catalog that knows of neither image."""
    return Shelf.at(shelf.root, catalog_url=f"sqlite:///{shelf.root / 'another.db'}")


def counted(job: StreamingJob, restored: ImageRecord | None) -> int:
    with holding(job.catalog, JOB) as lease:
        return count_beyond_what_is_used(job, restored, lease)


def next_number(shelf: Shelf) -> int:
    return shelf.job.catalog.jobs.get(JOB).next_number


def test_a_new_job_counts_from_one(shelf: Shelf) -> None:
    assert counted(shelf.job, None) == 1


def test_a_catalog_that_was_lost_counts_on_from_what_is_stored(shelf: Shelf) -> None:
    for _ in range(11):
        shelf.checkpoint()
    after = forgotten(shelf)

    assert counted(after.job, None) == 12
    assert next_number(after) == 12
    after.job.catalog.close()


def test_a_restored_savepoint_counts_too(shelf: Shelf) -> None:
    shelf.numbers = 40
    savepoint = shelf.savepoint("mine")
    set_job(shelf.job.catalog, JOB, next_number=7)

    assert counted(shelf.job, None) == 7
    assert counted(shelf.job, savepoint) == 42
    assert next_number(shelf) == 42


def test_a_counter_that_is_further_on_stays(shelf: Shelf) -> None:
    set_job(shelf.job.catalog, JOB, next_number=100)

    assert counted(shelf.job, shelf.checkpoint()) == 100
    assert next_number(shelf) == 100


def test_a_start_counts_on_before_its_query_runs(shelf: Shelf) -> None:
    shelf.checkpoint()
    after = forgotten(shelf)
    seen: list[int] = []

    def start(_live: LiveDirectory) -> Any:
        seen.append(next_number(after))
        raise RuntimeError("that is enough")

    with pytest.raises(RuntimeError, match="that is enough"):
        run_job(after.job, RunRequest("run", start))

    assert seen == [2]
    after.job.catalog.close()
