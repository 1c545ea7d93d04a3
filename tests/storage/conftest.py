import io
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.image import FileEntry, ImageHeader, ImageKind, SourceFile
from dagster_ckpt.options import CheckpointStorage, FileSystemCheckpointStorage, JobManagerCheckpointStorage
from dagster_ckpt.storage import ImageStore, StoredImage, open_store

JOB = "flights.delays"
THRESHOLD = 10


@dataclass(frozen=True)
class Place:
    """A configured storage whose images can be looked at from outside."""

    storage: CheckpointStorage

    def open(self) -> ImageStore:
        return open_store(self.storage, JOB)


@pytest.fixture
def make_place(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Place]:
    def make(kind: str) -> Place:
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


def header(number: int | None, kind: ImageKind = ImageKind.CHECKPOINT) -> ImageHeader:
    return ImageHeader(
        image_id=f"image-{number}",
        job_id=JOB,
        kind=kind,
        number=number,
        created_at_ms=1,
        batch_id=number or 0,
        query_id="query",
    )


def sources(files: dict[str, bytes]) -> list[SourceFile]:
    def opener(data: bytes) -> Callable[[], io.BytesIO]:
        return lambda: io.BytesIO(data)

    # Names that begin with a uuid-like "id-" are taken for identities, as the file names of RocksDB are.
    return [
        SourceFile(path, len(data), path if path.startswith("id-") else None, opener(data))
        for path, data in files.items()
    ]


def restored(store: ImageStore, location: str) -> dict[str, bytes]:
    files: dict[str, bytes] = {}

    def write(entry: FileEntry, chunks: Iterable[bytes]) -> None:
        files[entry.path] = b"".join(chunks)

    store.extract(location, write)
    return files


class Job:
    """Short words for what the tests do."""

    def __init__(self, store: ImageStore) -> None:
        self.store = store

    def stored(self, number: int | None, files: dict[str, bytes], base: str | None = None, **how: Any) -> StoredImage:
        return self.store.write_checkpoint(header(number), sources(files), base=base, **how)

    def stored_of(self, number: int, files: list[SourceFile]) -> StoredImage:
        return self.store.write_checkpoint(header(number), files)

    def checkpoint(self, number: int, files: dict[str, bytes], base: str | None = None) -> str:
        return self.stored(number, files, base).location

    def savepoint(
        self, number: int, files: dict[str, bytes], target: str | None = None, base: str | None = None
    ) -> str:
        return self.stored_savepoint(number, files, target, base).location

    def stored_savepoint(
        self, number: int, files: dict[str, bytes], target: str | None = None, base: str | None = None
    ) -> StoredImage:
        order = header(number, ImageKind.SAVEPOINT)
        return self.store.write_savepoint(order, sources(files), target_directory=target, base=base)

    def restored(self, location: str) -> dict[str, bytes]:
        return restored(self.store, location)


@pytest.fixture
def job_of() -> type[Job]:
    return Job
