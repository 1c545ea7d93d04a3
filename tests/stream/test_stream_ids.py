"""A stream id names folders: one that would lead out of them is refused by streams and by storages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.errors import OptionError
from dagster_ckpt.snapshot.opening import open_store
from tests.support.retention_shelf import Shelf


@pytest.mark.parametrize("stream_id", ["../../evil", "..", "a/b", "", ".preflight", "a\n", "x" * 129])
def test_a_stream_id_that_leads_out_of_its_folder_is_refused(tmp_path: Path, stream_id: str) -> None:
    shelf = Shelf.reopened(tmp_path)

    with pytest.raises(OptionError, match="cannot name a folder"):
        open_store(FileSystemCheckpointStorage(f"file://{tmp_path}/snapshots"), stream_id)
    with pytest.raises(OptionError, match="cannot name a folder"):
        replace(shelf.stream, stream_id=stream_id)
    shelf.stream.catalog.close()
