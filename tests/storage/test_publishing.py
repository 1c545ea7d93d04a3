"""Objects that are seen whole or not at all, and not before what they are built on is there."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import pytest

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.io.custom import CustomFileIO, FolderFileIO, StoredObject
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.fsspec import FsspecFileIO
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.io.memory import MemoryFileIO

NAME = "chk-1/_metadata"


class Shelf(CustomFileIO):
    """A place of a user's own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.kept: dict[str, bytes] = {}

    def put(self, name: str, data: BinaryIO) -> None:
        self.kept[name] = data.read()

    def get(self, name: str) -> bytes:
        return self.kept[name]

    def remove(self, name: str) -> None:
        self.kept.pop(name, None)

    def objects(self, prefix: str) -> Iterable[StoredObject]:
        return [StoredObject(name, len(data), 1) for name, data in self.kept.items() if name.startswith(prefix)]


SPACES: dict[str, Callable[[Path], FileIO]] = {
    "disk": lambda root: LocalFileIO(root, buffer_bytes=-1),
    "folders": lambda root: FsspecFileIO(f"local://{root}", {}),
    "objects": lambda root: FsspecFileIO(f"memory://{root}", {}),
    "memory": lambda root: MemoryFileIO(f"memory://{root}"),
    "custom": lambda root: Shelf(f"shelf://{root}"),
    "a folder of one": lambda root: FolderFileIO(MemoryFileIO(f"memory://{root}"), "stream"),
}


@pytest.fixture(params=SPACES)
def space(request: pytest.FixtureRequest, tmp_path: Path) -> FileIO:
    return SPACES[request.param](tmp_path / "space")


def test_an_object_is_seen_after_what_it_waits_for(space: FileIO) -> None:
    seen: list[int | None] = []
    space.write(NAME, [b"whole"], before_visible=lambda: seen.append(space.size(NAME)))
    assert seen == [None]
    assert space.read(NAME) == b"whole"
    assert set(space.list("chk-1")) == {"_metadata"}


def test_where_that_fails_nothing_is_there(space: FileIO) -> None:
    def fail() -> None:
        raise StorageAccessError("the data is not on the disk")

    with pytest.raises(StorageAccessError, match="the data is not on the disk"):
        space.write(NAME, [b"whole"], before_visible=fail)
    assert space.size(NAME) is None
    assert space.list("chk-1") == {}
