"""File sources: the entries of their log that a resume needs, and the input files that they have read.

The log (`FileStreamSourceLog`) has one entry per planned batch; every tenth, a `.compact` entry, lists all files so
far. Other sources write a few small files once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from dagster_ckpt.errors import (
    CkptError,
    IncompleteCutError,
    LiveDirectoryError,
    StorageAccessError,
    UnknownLayoutError,
)
from dagster_ckpt.io.file_io import Entry, FileIO
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.spark.checkpoint_dir.layout import SOURCES, NeededFile, read_needed
from dagster_ckpt.spark.checkpoint_dir.logs import OffsetEntry, check_log_version, parse_log_lines
from dagster_ckpt.spark.versions import OFFSET_LOG_VERSION
from dagster_ckpt.values.redaction import without_secrets
from dagster_ckpt.values.safe_parsing import LARGEST_LONG, from_json, number_in
from dagster_ckpt.values.storage_path import local_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMPACT = ".compact"


def log_offset(offset: str | None) -> int | None:
    if offset is None:
        return None
    try:
        value = from_json(offset)
    except ValueError:
        return None
    position = value.get("logOffset") if isinstance(value, dict) and len(value) == 1 else None
    return position if type(position) is int and -1 <= position <= LARGEST_LONG else None


def entry_id(name: str) -> int | None:
    return number_in(name.removesuffix(COMPACT))


def entry_ids(names: Iterable[str]) -> dict[str, int]:
    return {name: number for name in names if (number := entry_id(name)) is not None}


def entries_by_id(names: Iterable[str]) -> dict[int, str]:
    found: dict[int, str] = {}
    for name, number in entry_ids(names).items():
        found[number] = name if name.endswith(COMPACT) else found.get(number, name)
    return found


@dataclass(frozen=True)
class SourceFile:
    path: str
    position: int
    modified_at_ms: int | None = None


def files_after(folder: FileIO, source: str, position: int) -> list[SourceFile]:
    directory = f"{SOURCES}/{source}"
    names = entry_ids(folder.listing(directory).names)
    newest = max((number for name, number in names.items() if name.endswith(COMPACT)), default=-1)
    needed = [
        name
        for name, number in names.items()
        if number > max(position, newest) or (number == newest > position and name.endswith(COMPACT))
    ]
    entries = {f"{directory}/{name}": folder.read(f"{directory}/{name}") for name in needed}
    return [each for each in files_in_entries(entries) if each.position > position]


def files_in_entries(entries: Mapping[str, bytes]) -> list[SourceFile]:
    found: dict[SourceFile, None] = {}
    for path, data in entries.items():
        if entry_id(path.rpartition("/")[2]) is None:
            continue
        for line in parse_log_lines(data, path):
            name, position, modified = line.get("path"), line.get("batchId"), line.get("timestamp")
            if isinstance(name, str) and isinstance(position, int):
                found[SourceFile(name, position, modified if type(modified) is int else None)] = None
    return list(found)


def refuse_unassignable_offsets(folder: FileIO, committed: OffsetEntry, names: Iterable[str]) -> None:
    unnumbered = sorted(name for name in names if number_in(name) is None)
    if committed.format_version > 1 or not unnumbered:
        return
    entries = folder.list(SOURCES)
    named = [name for name in unnumbered if name in entries and entries[name].is_directory]
    if named:
        raise UnknownLayoutError(
            f"{folder.url}/{SOURCES} has sources with names ({', '.join(named[:3])}), but the offset log has version "
            "1, which numbers them: it does not say which offset belongs to which source. Set "
            f"{OFFSET_LOG_VERSION} to 2 and start in a new live directory."
        )


def source_files(
    folder: FileIO,
    source: str,
    committed: OffsetEntry,
    before: OffsetEntry | None,
    in_flight: OffsetEntry | None,
) -> list[NeededFile]:
    """List the files of one source that a resume after `committed` needs.

    Without the offsets of the batch in flight, Spark would merge later entries into the next batch. It reads the
    previous batch's offsets, `before`, again.
    """
    directory = f"{SOURCES}/{source}"
    offset = committed.sources.get(source)
    position = log_offset(offset)
    carried = log_offset(in_flight.sources.get(source)) if in_flight else None
    if position is None and (offset is not None or not _is_file_source_log(folder, directory)):
        return [read_needed(folder, path) for path, _entry in folder.find(directory)]
    last = max(-1 if position is None else position, -1 if carried is None else carried)
    earlier = log_offset(before.sources.get(source)) if before else None
    # Spark asks for the committed batch's files again: its first entry must not be inside a compact one.
    base_limit = min(-1 if position is None else position, -1 if earlier is None else earlier + 1)
    if before is None or earlier is None:
        base_limit = -1 if position is None else position
    return [_log_entry(folder, f"{directory}/{name}") for name in _entries(folder, directory, base_limit, last)]


def _log_entry(folder: FileIO, path: str) -> NeededFile:
    file = read_needed(folder, path)
    check_log_version(file.data or b"", f"{folder.url}/{path}")
    return file


def _entries(folder: FileIO, directory: str, base_limit: int, last: int) -> list[str]:
    names = entries_by_id(folder.listing(directory).names)
    compacts = (number for number, name in names.items() if name.endswith(COMPACT))
    base = max((number for number in compacts if number <= min(base_limit, last)), default=-1)
    needed = range(max(base, 0), last + 1)
    missing = next((number for number in needed if number not in names), None)
    if missing is not None:
        raise IncompleteCutError(
            f"{folder.url}/{directory}/{missing} is missing: the file source's log is needed up to entry {last}, from "
            f"{(f'{base}{COMPACT}' if base >= 0 else 'its beginning')}. Spark may be purging; the next attempt reads "
            "a newer commit. If it stays missing, the live directory is damaged: restore a snapshot."
        )
    return [names[number] for number in needed]


def _is_file_source_log(folder: FileIO, directory: str) -> bool:
    entries: dict[str, Entry] = folder.list(directory)
    for name in entries:
        if entry_id(name) is None:
            return False
        where = f"{directory}/{name}"
        try:
            lines = parse_log_lines(folder.read(where), where)
        except LiveDirectoryError:
            return False
        return all("path" in line and "batchId" in line for line in lines)
    return False


_LISTED_FROM = 20
_STATUS = re.compile(r"path=([^;]*);(?:(?!path=).)*?modification_time=(\d+)", re.DOTALL)


def existing_files(
    uris: Sequence[str], session: SparkSession | None = None, *, reachable_scheme: str = "file"
) -> dict[str, int | None] | None:
    """Return the files that exist, with modification times in ms since the epoch; None if unknown.

    Without a session, this process looks at local files and those of `reachable_scheme`.
    """
    by_folder: dict[str, list[str]] = defaultdict(list)
    for uri in uris:
        by_folder[uri.rpartition("/")[0]].append(uri)
    jvm: Any = getattr(session, "_jvm", None)
    existing: dict[str, int | None] = {}
    for folder, files in by_folder.items():
        if jvm is not None and session is not None:
            existing |= _in_hadoop(jvm, session, folder, files)
            continue
        found = _found_here(folder, files) if folder.partition(":")[0] in ("file", reachable_scheme) else None
        if found is None:
            return None
        existing |= found
    return existing


def _found_here(folder: str, files: Iterable[str]) -> dict[str, int | None] | None:
    place = unquote(folder)
    path = local_path(place)
    if path is not None and not path.is_dir():
        # The folder may be on another machine.
        return None
    existing: dict[str, int | None] = {}
    try:
        entries = open_file_io(place).list(hidden=True)
        if path is None and not entries and not open_file_io("/".join(place.split("/")[:3])).list(hidden=True):
            # This process's store has no such bucket.
            return None
        for each in files:
            entry = entries.get(unquote(each.rpartition("/")[2]))
            if entry is not None:
                with suppress(FileNotFoundError):
                    existing[each] = entry.status().modified_at_ms
    except (CkptError, OSError, ValueError):
        return None
    return existing


def _in_hadoop(jvm: Any, session: SparkSession, folder: str, files: Sequence[str]) -> dict[str, int | None]:
    existing: dict[str, int | None] = {}
    try:
        place = _path(jvm, folder)
        system = place.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
        listed = _listed(jvm, system, place) if len(files) >= _LISTED_FROM else {}
        for each in files:
            name, path = unquote(each.rpartition("/")[2]), _path(jvm, each)
            if name in listed:
                existing[each] = listed[name]
            elif system.exists(path):
                existing[each] = int(system.getFileStatus(path).getModificationTime())
    except Exception as error:
        raise StorageAccessError(
            f"The files in {unquote(folder)} cannot be listed: {without_secrets(str(error))[:300]}"
        ) from error
    return existing


def _listed(jvm: Any, system: Any, place: Any) -> dict[str, int]:
    if not system.exists(place):
        return {}
    text = str(jvm.scala.runtime.ScalaRunTime.stringOf(system.listStatus(place)))
    return {path.rpartition("/")[2]: int(modified) for path, modified in _STATUS.findall(text)}


def _path(jvm: Any, uri: str) -> Any:
    return jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(uri))
