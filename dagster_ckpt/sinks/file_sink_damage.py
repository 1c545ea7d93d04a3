"""Whether the log of a file sink is damaged and still its stream's: from its bytes, and from what a snapshot captured.

A log that another query wrote, or the same one on another way, is whole: only the guard judges it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from dagster_ckpt.errors import LiveDirectoryError, UnknownLayoutError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.sinks.file_sink_log import LOG, has_beginning, log_entries, needed_entries
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry
from dagster_ckpt.spark.checkpoint_dir.checksums import fits_hadoop
from dagster_ckpt.spark.checkpoint_dir.file_source import COMPACT, entry_id
from dagster_ckpt.spark.checkpoint_dir.logs import parse_log_lines

_SHOWN = 3
# Bare names of part files, which are unique, and their lengths.
_Files = Mapping[str, object]


@dataclass(frozen=True)
class DamagedLog:
    """A damaged log that is still its stream's.

    Attributes:
        folder: The folder of the sink.
        found: What is wrong with it.
    """

    folder: str
    found: str


def damaged_log(path: str, captured: Sequence[SinkEntry], committed: int | None = None) -> DamagedLog | None:
    """The damage of the log of a file sink; None if it is whole, or if what is left of it is not this stream's.

    Args:
        path: The folder of the sink.
        captured: Its log as a snapshot of the stream has captured it.
        committed: A batch that the query has committed, which the sink must have; None if none is known.

    Raises:
        StorageAccessError: The log cannot be read.
    """
    folder, noted = open_file_io(path), _Noted.of(captured, path)
    names = log_entries(folder)
    last = max(noted.last, -1 if committed is None else committed)
    found: list[str] = []
    confirmed = doubtful = False
    if max(names, default=-1) < last:
        ends = f"ends with entry {max(names)}" if names else "has no entry"
        found.append(f"it {ends}, and the stream has written batch {last} there")
    needed = needed_entries(names)
    if names and not has_beginning(names):
        found.append(f"it begins with entry {needed.start}, and no {COMPACT} entry has what came before")
    for number in needed:
        trouble = _trouble(folder, names[number], noted) if number in names else f"entry {number} is missing"
        if isinstance(trouble, _Stranger):
            return None
        found += [str(trouble)] if trouble is not None else []
        doubtful |= isinstance(trouble, _Doubt)
        confirmed |= trouble is None
    if not found or (doubtful and not confirmed):
        return None
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return DamagedLog(path, f"{'; '.join(found[:_SHOWN])}{more}")


def missing_part_files(path: str, captured: Sequence[SinkEntry]) -> list[str]:
    """Files that a captured log lists, and that are not in the folder with their lengths; bare names.

    Raises:
        LiveDirectoryError: An entry cannot be parsed.
        StorageAccessError: The folder cannot be listed.
    """
    listed = _Noted.of(captured, path).files
    return _absent(open_file_io(path), listed)


@dataclass(frozen=True)
class _Noted:
    """The log as a snapshot has it: its last entry, the files of each entry, and all of them."""

    last: int
    entries: Mapping[str, _Files]
    files: _Files

    @staticmethod
    def of(captured: Sequence[SinkEntry], path: str) -> _Noted:
        in_order = sorted(captured, key=lambda each: entry_id(each.name) or 0)
        entries = {each.name: _files(each.data, f"{path}/{LOG}/{each.name}") for each in in_order}
        return _Noted(
            max((entry_id(name) or 0 for name in entries), default=-1),
            entries,
            {name: size for files in entries.values() for name, size in files.items()},
        )


class _Stranger:
    """An intact entry of another query, or of this one on another way."""


class _Doubt(str):
    """An altered entry, which may as well be another query's: only the rest of the log shows whose it is."""

    __slots__ = ()


def _trouble(folder: FileIO, name: str, noted: _Noted) -> str | _Stranger | None:
    entry = f"{LOG}/{name}"
    try:
        data = folder.read(entry)
    except FileNotFoundError:
        # Compacted since it was listed.
        return None
    fits = fits_hadoop(folder, entry, data)
    if fits is False:
        return f"entry {name} does not match Hadoop's checksum beside it"
    try:
        files = _files(data, f"{folder.url}/{entry}")
    except UnknownLayoutError as trouble:
        # Of a later Spark, unless the snapshot has it in a version that is known.
        return str(trouble) if name in noted.entries else _Stranger()
    except LiveDirectoryError as trouble:
        return str(trouble)
    known = noted.entries.get(name)
    if known is not None and files.keys() <= known.keys():
        return None if files == known else f"entry {name} does not list what it listed for the snapshot"
    if known is None and not _is_anothers(name, files, noted):
        is_later = name.endswith(COMPACT) and (entry_id(name) or 0) > noted.last
        # The retention time of a sink only drops the oldest files.
        is_cut = is_later and bool(files.keys() & noted.files.keys()) and list(noted.files)[-1] not in files
        return f"entry {name} lacks files that were listed before it" if is_cut else None
    # An entry that is as it was written, and whose files are there, was not altered.
    if fits is True or not _absent(folder, files):
        return _Stranger()
    return _Doubt(f"entry {name} lists files that neither the snapshot has nor exist")


def _is_anothers(name: str, files: _Files, noted: _Noted) -> bool:
    """Whether an entry lists what the snapshot, which has all up to its batch, does not."""
    if (entry_id(name) or 0) <= noted.last:
        return not files.keys() <= noted.files.keys()
    # A later compact entry has what came before, but for what is older than the sink's retention time.
    return name.endswith(COMPACT) and bool(noted.files) and not files.keys() & noted.files.keys()


def _absent(folder: FileIO, files: _Files) -> list[str]:
    """Files that are not there with their lengths."""
    there = {path.rpartition("/")[2]: path for path, _ in folder.find()} if files else {}
    return sorted(
        name for name, size in files.items() if name not in there or size not in (None, folder.size(there[name]))
    )


def _files(data: bytes, where: str) -> _Files:
    lines = parse_log_lines(data, where)
    return {unquote(str(line.get("path"))).rpartition("/")[2]: line.get("size") for line in lines}
