import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.config.checkpoint_storage import (
    CheckpointStorage,
    FileSystemCheckpointStorage,
    JobManagerCheckpointStorage,
)
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.snapshot.store import SnapshotStore
from dagster_ckpt.testing.trial_snapshots import TRIAL_STREAM, TrialStream
from tests.support.far_stores import SERVERS

THRESHOLD = 10


@dataclass(frozen=True)
class Place:
    """A configured storage whose snapshots can be looked at from outside."""

    storage: CheckpointStorage

    def open(self) -> SnapshotStore:
        return open_store(self.storage, TRIAL_STREAM)


@pytest.fixture
def make_place(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Place]:
    def make(kind: str) -> Place:
        if kind in SERVERS:
            bucket = request.getfixturevalue("far_stores").new_bucket(kind)
            return Place(FileSystemCheckpointStorage(f"{bucket.url}/c", THRESHOLD, storage_options=bucket.options))
        name = uuid.uuid4().hex
        if kind == "jobmanager":
            return Place(JobManagerCheckpointStorage(savepoint_path=f"file://{tmp_path}/savepoints"))
        options: dict[str, Any] = {}
        if kind == "s3":
            options = request.getfixturevalue("s3_options")
            import s3fs

            s3fs.S3FileSystem(**options).mkdir(name)
        urls = {
            "file": f"file://{tmp_path}/c",
            "folders": f"local://{tmp_path}/c",
            "memory": f"memory://{name}/c",
            "s3": f"s3://{name}/c",
            "jobmanager with path": f"file://{tmp_path}/c",
        }
        if kind == "jobmanager with path":
            return Place(JobManagerCheckpointStorage(urls[kind]))
        return Place(FileSystemCheckpointStorage(urls[kind], THRESHOLD, storage_options=options))

    return make


@pytest.fixture
def stream_of() -> type[TrialStream]:
    return TrialStream
