import io
from collections.abc import Callable

import pytest

from dagster_ckpt.io.memory import MemoryFileIO
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.snapshot.reuse import SourceFile
from dagster_ckpt.values.modes import SnapshotKind


@pytest.fixture
def space() -> MemoryFileIO:
    return MemoryFileIO("memory://stream")


@pytest.fixture
def header() -> Callable[[int], SnapshotHeader]:
    def make(number: int) -> SnapshotHeader:
        return SnapshotHeader(
            snapshot_id=f"snapshot-{number}",
            stream_id="stream",
            kind=SnapshotKind.CHECKPOINT,
            number=number,
            created_at_ms=1,
            batch_id=number,
            query_id="query",
            properties={"watermark": "2013-01-01T00:00:00Z", "rows": [1, None, {"a": 0.5}]},
        )

    return make


class Content:
    """A source file that counts how often it is opened."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.opened = 0

    def open(self) -> io.BytesIO:
        self.opened += 1
        return io.BytesIO(self.data)

    def file(self, path: str, *, identity: str | None = None, size: int | None = None) -> SourceFile:
        return SourceFile(path, len(self.data) if size is None else size, identity, self.open)


@pytest.fixture
def content() -> type[Content]:
    return Content
