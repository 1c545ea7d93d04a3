"""Part files of a file sink, and which of them its log lists. Readers that follow the log see no other files."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import unquote

from dagster_ckpt.errors import SinkRollbackError
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.sinks.file_sink_log import LOG, own_past
from dagster_ckpt.spark.checkpoint_dir.file_source import entry_id
from dagster_ckpt.spark.checkpoint_dir.logs import parse_log_lines

# `ManifestFileCommitProtocol`: every file name contains a uuid, so the bare name identifies the
# file.
_PART = re.compile(r"part-\d{5,}-(?P<uuid>[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}).*")
# Left by a batch job (`FileOutputCommitter`), and by no streaming query.
_SUCCESS = "_SUCCESS"


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

    @property
    def uuid(self) -> str | None:
        """The uuid in its name. A file sink makes one for each file, a batch job one for all of its files."""
        match = _PART.fullmatch(self.name)
        return match["uuid"] if match else None


@dataclass(frozen=True)
class SinkLog:
    """Content of a file sink's log.

    Attributes:
        names: Bare names of all files in any of its entries.
        newest_at_ms: When its newest entry was written; None if the file system does not report it.
    """

    names: frozenset[str]
    newest_at_ms: int | None


@dataclass(frozen=True)
class Leftovers:
    """The part files of a folder, and the logs that decide which of them are needed.

    Attributes:
        files: All part files, listed before the log: a file committed in between is then in the log.
        log: Content of the log.
        now_ms: The current time by the clock that dates the files; None if it dates none.
        has_batch_job: Whether a batch job has written there as well.
    """

    files: tuple[PartFile, ...]
    log: SinkLog
    now_ms: int | None
    has_batch_job: bool = False


def read_leftovers(path: str) -> Leftovers:
    """List the part files of a folder, then read its log.

    Raises:
        SinkRollbackError: The log is missing or incomplete, so the listed files are unknown.
        LiveDirectoryError: The log has a hole, or an entry cannot be parsed.
        StorageAccessError: The folder cannot be read or written.
    """
    files = tuple(part_files(path))
    has_batch_job = open_file_io(path).size(_SUCCESS) is not None
    return Leftovers(files, read_sink_log(path), storage_time_ms(path), has_batch_job)


def part_files(path: str) -> list[PartFile]:
    """Files below a folder with a name in the form of Spark's file sink.

    Raises:
        StorageAccessError: The folder cannot be listed.
    """
    return sorted((file for file in _all_files(path) if _PART.fullmatch(file.name)), key=lambda file: file.path)


def storage_time_ms(path: str) -> int | None:
    """The current time by the clock that dates the files of a folder, ms since the epoch; None if it dates none.

    Raises:
        StorageAccessError: The folder cannot be written.
    """
    # Readers of the folder pass over hidden files.
    return open_file_io(path).clock_ms(f".dagster_ckpt-probe-{uuid.uuid4().hex}")


def read_sink_log(path: str) -> SinkLog:
    """Read the whole log of a file sink.

    Raises:
        SinkRollbackError: The log is missing or incomplete, so the listed files are unknown.
        LiveDirectoryError: The log has a hole, or an entry cannot be parsed.
        StorageAccessError: It cannot be read.
    """
    folder = open_file_io(path)
    entries = {name: number for name in folder.list(LOG) if (number := entry_id(name)) is not None}
    if not entries:
        raise SinkRollbackError(
            f"{path} has no log ({LOG} is missing or empty), so orphaned files there cannot be identified. Readers "
            "read every file in such a folder; delete unneeded ones by hand."
        )
    own_past(path, max(entries.values()))
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
    folder = open_file_io(path)
    for file in files:
        folder.delete(file.path)
        parent, _, name = file.path.rpartition("/")
        folder.delete(f"{parent}/.{name}.crc".lstrip("/"))


def _all_files(path: str) -> Iterator[PartFile]:
    # What is behind a symbolic link belongs to its creator.
    for name, entry in open_file_io(path, follow_links=False).find(hidden=True):
        with suppress(FileNotFoundError):
            status = entry.status()
            yield PartFile(name, status.version.size, status.modified_at_ms)
