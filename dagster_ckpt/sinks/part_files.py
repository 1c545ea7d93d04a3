"""Part files of a file sink, and which of them its log lists. Readers that follow the log see no other files."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fsspec

from dagster_ckpt.config.storage_path import fsspec_arguments
from dagster_ckpt.errors import SinkRollbackError, StorageAccessError
from dagster_ckpt.io.folder import local_path
from dagster_ckpt.io.remote_folder import open_folder
from dagster_ckpt.spark.checkpoint_dir.file_sink_log import LOG
from dagster_ckpt.spark.checkpoint_dir.file_source import entry_id
from dagster_ckpt.spark.checkpoint_dir.logs import parse_log_lines
from dagster_ckpt.spark.checkpoint_dir.rewind import own_past

# `ManifestFileCommitProtocol`: every file name contains a uuid, so the bare name identifies the
# file.
_PART = re.compile(r"part-\d{5,}-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}.*")
_TIMES = ("LastModified", "last_modified", "mtime", "created")


@dataclass(frozen=True)
class PartFile:
    """A data file below a file sink's folder.

    Attributes:
        path: Its path relative to the folder.
        size: Bytes.
        modified_at_ms: When it was written, ms since the epoch; None if the file system does not
            report it.
    """

    path: str
    size: int
    modified_at_ms: int | None

    @property
    def name(self) -> str:
        """Its bare name, which is unique."""
        return self.path.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class SinkLog:
    """Content of a file sink's log.

    Attributes:
        names: Bare names of all files in any of its entries.
        newest_at_ms: When its newest entry was written; None if the file system does not report it.
    """

    names: frozenset[str]
    newest_at_ms: int | None


def part_files(path: str) -> list[PartFile]:
    """Files below a folder with a name in the form of Spark's file sink.

    Raises:
        StorageAccessError: The folder cannot be listed.
    """
    return sorted((file for file in _all_files(path) if _PART.fullmatch(file.name)), key=lambda file: file.path)


def storage_time_ms(path: str) -> int | None:
    """The current time by the clock that dates the files of a folder, ms since the epoch; None if it dates none.

    A hidden file is written and inspected, because the clock of this machine may differ from the
    storage's by hours.

    Raises:
        StorageAccessError: The folder cannot be written.
    """
    folder = open_folder(path)
    name = f".dagster_ckpt-probe-{uuid.uuid4().hex}"
    folder.write(name, [b"dagster_ckpt"])
    try:
        with _listing(path):
            return _written_at_ms(path.rstrip("/"), name)
    finally:
        folder.delete(name)


def read_sink_log(path: str) -> SinkLog:
    """Read the whole log of a file sink.

    Raises:
        SinkRollbackError: The log is missing or incomplete, so the listed files are unknown.
        LiveDirectoryError: The log has a hole, or an entry cannot be parsed.
        StorageAccessError: It cannot be read.
    """
    folder = open_folder(path)
    entries = {name: number for name in folder.list(LOG) if (number := entry_id(name)) is not None}
    if not entries:
        raise SinkRollbackError(
            f"{path} has no log ({LOG} is missing or empty), so no file there can be told to be an orphan. Readers "
            "take all files of such a folder for rows; delete by hand what is not needed."
        )
    own_past([f"FileSink[{path}]"], max(entries.values()))
    newest = max(entries, key=entries.__getitem__)
    written = {file.name: file.modified_at_ms for file in _all_files(f"{path.rstrip('/')}/{LOG}")}
    names = frozenset(
        name for entry in entries for name in names_in(folder.read(f"{LOG}/{entry}"), f"{path}/{LOG}/{entry}")
    )
    return SinkLog(names, written.get(newest))


def names_in(data: bytes, where: str) -> set[str]:
    """Bare names of the files that one log entry lists.

    Raises:
        LiveDirectoryError: It cannot be parsed.
    """
    return {unquote(str(line.get("path", ""))).rsplit("/", 1)[-1] for line in parse_log_lines(data, where)}


def delete_part_files(path: str, files: Iterable[PartFile]) -> None:
    """Delete files of a sink together with their Hadoop checksum files.

    Raises:
        StorageAccessError: A file could not be deleted; those before it were deleted.
    """
    folder = open_folder(path)
    for file in files:
        folder.delete(file.path)
        parent, _, name = file.path.rpartition("/")
        folder.delete(f"{parent}/.{name}.crc".lstrip("/"))


def _all_files(path: str) -> Iterator[PartFile]:
    local = local_path(path)
    with _listing(path):
        yield from _local_files(local) if local is not None else _remote_files(path)


def _written_at_ms(path: str, name: str) -> int | None:
    local = local_path(path)
    if local is not None:
        return (local / name).stat().st_mtime_ns // 1_000_000
    file_system, root = fsspec.core.url_to_fs(f"{path}/{name}", **fsspec_arguments(path, {}))
    file_system.invalidate_cache(root)
    return _modified_at_ms(file_system.info(root))


@contextmanager
def _listing(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ImportError, ValueError) as error:
        raise StorageAccessError(
            f"Cannot list {path}: {error}. Check that it is reachable and that this process has rights to it."
        ) from error


def _local_files(root: Path) -> Iterator[PartFile]:
    for directory, _, names in os.walk(root):
        for name in names:
            file = Path(directory) / name
            try:
                stat = file.stat()
            except FileNotFoundError:
                continue
            yield PartFile(file.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns // 1_000_000)


def _remote_files(path: str) -> Iterator[PartFile]:
    file_system, root = fsspec.core.url_to_fs(path, **fsspec_arguments(path, {}))
    file_system.invalidate_cache(root)
    infos: Mapping[str, Mapping[str, Any]] = file_system.find(root, detail=True)
    for name, info in infos.items():
        yield PartFile(name[len(root) :].lstrip("/"), int(info.get("size") or 0), _modified_at_ms(info))


def _modified_at_ms(info: Mapping[str, Any]) -> int | None:
    for key in _TIMES:
        time = info.get(key)
        if isinstance(time, datetime):
            return int(time.timestamp() * 1000)
        if isinstance(time, int | float):
            # Seconds as a float deviate slightly from the exact millisecond.
            return round(time * 1000)
    return None
