"""A job id names folders: one that would lead out of them is refused wherever a job or its storage is made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from retention_shelf import Shelf

from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.errors import OptionError
from dagster_ckpt.snapshot.opening import open_store


@pytest.mark.parametrize("job_id", ["../../evil", "..", "a/b", "", ".preflight", "a\n", "x" * 129])
def test_a_job_id_that_leads_out_of_its_folder_is_refused(tmp_path: Path, job_id: str) -> None:
    shelf = Shelf.reopened(tmp_path)

    with pytest.raises(OptionError, match="cannot be the id of a job"):
        open_store(FileSystemCheckpointStorage(f"file://{tmp_path}/images"), job_id)
    with pytest.raises(OptionError, match="cannot be the id of a job"):
        replace(shelf.job, job_id=job_id)
    shelf.job.catalog.close()
