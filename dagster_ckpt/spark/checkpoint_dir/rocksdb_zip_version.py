"""The version in the metadata of RocksDB's snapshots, whose content is the same in every version.

Spark 4.0 writes the checkpoint format (`RocksDBCheckpointMetadata.VERSION`), as it is when the JVM first needs it, and
reads only that. Other releases write and read only 1.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.io.file_io import FileIO, Hook
from dagster_ckpt.spark.checkpoint_dir.layout import STATE, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.state_store_formats import read_member
from dagster_ckpt.values.safe_parsing import reading

OF_OTHER_RELEASES = 1
_MEMBER = "metadata"


def is_of_spark_4_0(live: LiveDirectory) -> bool:
    """Whether only Spark 4.0 reads the snapshots, which all have one version; ignores damage."""
    with suppress(LiveDirectoryError, FileNotFoundError):
        # With changelogs, not every partition has a snapshot.
        path = next(_snapshots(live.folder), None)
        return path is not None and _line(live, path, live.folder.read(path)) != _line_of(OF_OTHER_RELEASES)
    return False


def give_snapshots_version(live: LiveDirectory, version: int, watch: Hook) -> None:
    """Rewrite the version in a new directory, which the caller flushes, or deletes on an error.

    No snapshot of the directory may exist yet: it would recognize the files by their names.
    """
    folder = live.folder
    for path in list(_snapshots(folder)):
        watch()
        data = folder.read(path)
        if _line(live, path, data) != _line_of(version):
            folder.write(path, [_with_line(live, path, data, _line_of(version))])
            place, _, name = path.rpartition("/")
            # These are Hadoop's and Spark's checksums of the old content.
            for checksum in (f"{place}/.{name}.crc", f"{path}.crc", f"{place}/.{name}.crc.crc"):
                folder.delete(checksum)


def _snapshots(folder: FileIO) -> Iterator[str]:
    return (path for path, _ in folder.find(STATE) if path.endswith(".zip"))


def _line_of(version: int) -> bytes:
    return b"v%d" % version


def _line(live: LiveDirectory, path: str, data: bytes) -> bytes:
    with _reading(live, path):
        return read_member(data, _MEMBER).partition(b"\n")[0].strip()


def _with_line(live: LiveDirectory, path: str, data: bytes, line: bytes) -> bytes:
    made = io.BytesIO()
    with (
        _reading(live, path),
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for each in old.namelist():
            content = read_member(data, each)
            new.writestr(each, line + b"\n" + content.partition(b"\n")[2] if each == _MEMBER else content)
    return made.getvalue()


def _reading(live: LiveDirectory, path: str) -> AbstractContextManager[None]:
    return reading(lambda why: LiveDirectoryError(f"{live.url}/{path} is not a readable RocksDB snapshot: {why}."))
