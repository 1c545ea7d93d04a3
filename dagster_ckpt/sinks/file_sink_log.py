"""A file sink's log of its batches: capture it for a snapshot, compare it, and roll it back.

`FileStreamSink` skips every batch up to the newest id in `<path>/_spark_metadata`, whichever query wrote it. An entry
is a file `<batch>`, or every tenth batch `<batch>.compact` with all before (`CompactibleFileStreamLog`). Spark rejects
a hole below the batch after which a query resumes (`getAllValidBatches`), so a new folder first gets a log without
files.

Spark writes absolute paths: a moved folder lists files of its old place, and one file has several spellings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import quote, unquote

from dagster_ckpt.errors import IncompleteCutError, RestoreError, SinkRollbackError, StorageAccessError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.location import lies_in, open_file_io
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import (
    SINKS_FOLDER,
    CapturedSink,
    SinkEntry,
    SinkLogFile,
    StillMine,
)
from dagster_ckpt.spark.checkpoint_dir.file_source import COMPACT, entries_by_id, entry_id, entry_ids
from dagster_ckpt.spark.checkpoint_dir.layout import NeededFile
from dagster_ckpt.spark.checkpoint_dir.logs import check_log_version, log_entry, parse_log_lines
from dagster_ckpt.values.storage_path import local_path

LOG = "_spark_metadata"
_NOTHING = b"v1"
# Hadoop does not escape these in a URI.
_SAFE = "/=:@!$&'()*+,;~"
_VERSION_LINE_BYTES = 100


def capture_log(path: str, folder_in_snapshot: str, batch_id: int) -> CapturedSink:
    folder = open_file_io(path)
    everything = log_entries(folder)
    newest = max(everything, default=None)
    if everything and not has_beginning(everything):
        raise _missing(folder, f"{min(everything) - 1}{COMPACT}", batch_id)
    names = {number: name for number, name in everything.items() if number <= batch_id}
    if not names:
        return CapturedSink(path, None, (), newest)
    last, needed = max(names), needed_entries(names)
    files = [_entry(folder, folder_in_snapshot, names.get(number), number, last) for number in needed]
    return CapturedSink(path, last, tuple(files), newest)


def log_entries(folder: FileIO) -> dict[int, str]:
    """Return names by batch; of a batch with two entries, the compact one."""
    return entries_by_id(folder.list(LOG))


def needed_entries(names: Mapping[int, str]) -> range:
    """Return the entries that Spark reads: from the newest compact or the first one."""
    first = max((number for number, name in names.items() if name.endswith(COMPACT)), default=min(names, default=0))
    return range(first, max(names, default=-1) + 1)


def has_beginning(names: Mapping[int, str]) -> bool:
    first = needed_entries(names).start
    return first == 0 or names[first].endswith(COMPACT)


def roll_back(path: str, batch_id: int, entries: Sequence[SinkEntry], *, still_mine: StillMine) -> None:
    """Roll a file sink back to the batch of a snapshot; -1 empties the log. Durable on return.

    Files of later batches stay on disk. Repeatable: the needed entries are durable before any is deleted, and the
    newest are deleted first, so the log never has a hole.
    """
    folder = open_file_io(path)
    wanted = {entry.name: entry.data for entry in entries}
    try:
        present = entry_ids(folder.list(LOG))
        write_entries(folder, entries, still_mine=still_mine)
        if present:
            folder.flush(LOG)
        for name in sorted(_surplus(present, wanted, batch_id), key=present.__getitem__, reverse=True):
            with still_mine():
                folder.delete(f"{LOG}/{name}")
            with still_mine():
                folder.delete(f"{LOG}/.{name}.crc")
        if present:
            # Otherwise, deleted entries could reappear after a power failure.
            folder.flush(LOG)
    except (StorageAccessError, FileNotFoundError) as error:
        raise SinkRollbackError(
            f"The sink {path} could not be rolled back to batch {batch_id}: {error}. Make it reachable and start "
            "again: the rollback continues where it stopped. Do not start the query before that: it would skip "
            "batches."
        ) from error


def write_entries(folder: FileIO, entries: Sequence[SinkEntry], *, still_mine: StillMine) -> None:
    """Write entries durably, oldest first, unless they are as wanted already."""
    present = folder.list(LOG)
    for entry in sorted(entries, key=lambda entry: entry_id(entry.name) or 0):
        if entry.name in present and folder.read(f"{LOG}/{entry.name}") == entry.data:
            # Spark may have written this entry, and does not flush.
            folder.flush(f"{LOG}/{entry.name}")
            continue
        # The checksum goes first: Hadoop rejects an entry that does not match it.
        with still_mine():
            folder.delete(f"{LOG}/.{entry.name}.crc")
        with still_mine():
            folder.write(f"{LOG}/{entry.name}", [entry.data])


def own_past(path: str, batch_id: int) -> list[SinkEntry]:
    captured = capture_log(path, SINKS_FOLDER, batch_id)
    if not captured.files:
        return _before_its_beginning(path, batch_id)
    first = captured.files[0].source.rsplit("/", 1)[-1]
    if first != "0" and not first.endswith(COMPACT):
        raise SinkRollbackError(
            f"{path}/{LOG} begins with entry {first}, and earlier entries are only in later compact files: the sink "
            f"cannot be rolled back to batch {batch_id}. Go back to a snapshot, which contains this log."
        )
    return [SinkEntry(file.source.rsplit("/", 1)[-1], file.folder.read(file.source)) for file in captured.files]


def _before_its_beginning(path: str, batch_id: int) -> list[SinkEntry]:
    folder = open_file_io(path)
    names = log_entries(folder)
    first = names.get(min(names, default=-1))
    if first is None:
        return []
    if not first.endswith(COMPACT) or listed_by(read_entry(folder, first), path):
        raise SinkRollbackError(
            f"{path}/{LOG} begins with entry {first}, so the sink cannot be rolled back to batch {batch_id}. Go back "
            "to a snapshot, which contains this log."
        )
    return _beginning(batch_id)


def _beginning(batch_id: int) -> list[SinkEntry]:
    """Return a log that lists no file and ends at a batch, as one compact entry.

    Spark derives a compaction interval from it (`deriveCompactInterval`) with any settings.
    """
    # As a compact entry, batch 0 alone would make every later entry a compact one.
    return [SinkEntry(f"{batch_id}{COMPACT}" if batch_id > 0 else str(batch_id), _NOTHING)]


def logged_batch(path: str) -> int | None:
    return max(log_entries(open_file_io(path)), default=None)


def begin_log(path: str, batch_id: int, *, still_mine: StillMine = nullcontext) -> None:
    """Begin a log without files, in a folder that may not exist; repeatable."""
    roll_back(path, -1, (), still_mine=still_mine)
    roll_back(path, batch_id, _beginning(batch_id), still_mine=still_mine)


class Past(StrEnum):
    """Relation of the current log to that of a snapshot.

    SAME: Up to the snapshot's batch it lists the same files.
    PART: It ends at or before that batch, with only some of the snapshot's files.
    SHARED: They have files in common, but diverge before that batch, for example by a rewind.
    STRANGER: They have no file in common.
    """

    NONE = "NONE"
    SAME = "SAME"
    PART = "PART"
    SHARED = "SHARED"
    STRANGER = "STRANGER"


@dataclass(frozen=True)
class SinkLogAtHand:
    """The files that a log lists up to a batch, and in `later` entries: all files, after a compaction."""

    last_batch: int | None
    up_to: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()
    compacted: bool = False
    is_later: bool = False

    @property
    def is_blank(self) -> bool:
        return self.last_batch is not None and not self.up_to | self.later


def past_of(at_hand: SinkLogAtHand, noted: frozenset[str]) -> Past:
    if at_hand.last_batch is None:
        return Past.NONE
    known = at_hand.up_to | at_hand.later
    if not at_hand.up_to <= noted:
        return Past.SHARED if noted & known else Past.STRANGER
    if not noted or noted <= known:
        return Past.SAME
    if not at_hand.is_later:
        return Past.PART
    # Files may have exceeded the sink's retention time.
    return (Past.SAME if at_hand.compacted else Past.SHARED) if noted & known else Past.STRANGER


def read_log_at_hand(path: str, batch_id: int) -> SinkLogAtHand:
    folder = open_file_io(path)
    names = log_entries(folder)
    if not names:
        return SinkLogAtHand(None)
    up_to: set[str] = set()
    later: set[str] = set()
    for number, name in _needed(names, batch_id).items():
        (up_to if number <= batch_id else later).update(listed_by(read_entry(folder, name), path))
    compacted = any(name.endswith(COMPACT) for number, name in names.items() if number > batch_id)
    if compacted:
        # After a rewind to an abandoned timeline, older entries of the one between remain, which Spark does not read.
        up_to &= later
    return SinkLogAtHand(
        max(names), frozenset(up_to), frozenset(later), compacted=compacted, is_later=max(names) > batch_id
    )


def committed_files(path: str) -> list[str]:
    urls = [unquote(url) for url in read_log_at_hand(path, -1).later]
    return [str(local_path(url) or url) for url in urls]


def files_of_batch(path: str, batch_id: int) -> list[str] | None:
    folder = open_file_io(path)
    names = log_entries(folder)
    if batch_id not in names:
        return None
    files = listed_by(read_entry(folder, names[batch_id]), path)
    if not names[batch_id].endswith(COMPACT):
        return list(files)
    before = {number: name for number, name in names.items() if number < batch_id}
    needed = range(needed_entries(before).start, batch_id)
    if not has_beginning(before) or any(number not in before for number in needed):
        return None
    earlier = files_of([read_entry(folder, before[number]) for number in needed], path)
    return [file for file in files if file not in earlier]


def read_entry(folder: FileIO, name: str) -> SinkEntry:
    return SinkEntry(name, folder.read(f"{LOG}/{name}"))


def files_of(entries: Sequence[SinkEntry], path: str) -> frozenset[str]:
    return frozenset(file for entry in entries for file in listed_by(entry, path))


def listed_by(entry: SinkEntry, path: str) -> dict[str, object]:
    return listed(entry.data, f"{path}/{LOG}/{entry.name}")


def listed(data: bytes, where: str) -> dict[str, object]:
    return {str(line.get("path")): line.get("size") for line in parse_log_lines(data, where)}


def bare(where: str) -> str:
    return unquote(where).rpartition("/")[2]


def entry_of(name: str, lines: Sequence[Mapping[str, Any]]) -> SinkEntry:
    return SinkEntry(name, log_entry(lines))


def _needed(names: Mapping[int, str], batch_id: int) -> dict[int, str]:
    compacts = [number for number, name in names.items() if name.endswith(COMPACT)]
    below = max((number for number in compacts if number <= batch_id), default=-1)
    newest = max(compacts, default=-1)
    return {n: name for n, name in names.items() if below <= n <= batch_id or n >= max(newest, batch_id + 1)}


def _surplus(present: dict[str, int], wanted: dict[str, bytes], batch_id: int) -> list[str]:
    compacts = (number for name, number in entry_ids(wanted).items() if name.endswith(COMPACT))
    # Spark derives its compaction interval from all names, but reads no entry below the compact one.
    unread_below = max(compacts, default=-1)
    return [
        name
        for name, number in present.items()
        if number > batch_id or (name not in wanted and number >= max(unread_below, 0))
    ]


def _entry(folder: FileIO, target: str, name: str | None, number: int, last: int) -> NeededFile:
    if name is None:
        raise _missing(folder, str(number), last)
    source = f"{LOG}/{name}"
    with folder.open(source) as stream:
        check_log_version(stream.read(_VERSION_LINE_BYTES).partition(b"\n")[0], f"{folder.url}/{source}")
    return SinkLogFile(folder, source, f"{target}/{name}", *folder.version(source))


def _missing(folder: FileIO, name: str, last: int) -> IncompleteCutError:
    return IncompleteCutError(
        f"{folder.url}/{LOG}/{name} is missing: rolling the sink back to batch {last} needs its log up to there. Do "
        "not delete files there. Put it back, or let `dagster-ckpt rebuild-output` write it from the snapshots."
    )


def url_of(folder: str, name: str) -> str:
    root = local_path(folder)
    place = f"file://{quote(str(root), safe=_SAFE)}" if root is not None else folder.rstrip("/")
    return f"{place}/{quote(name, safe=_SAFE)}"


def name_below(folder: str, where: str) -> str:
    root, file = local_path(folder), local_path(unquote(where))
    if root is not None and file is not None and file.is_relative_to(root):
        return file.relative_to(root).as_posix()
    prefix = f"{folder.rstrip('/')}/"
    if root is None and unquote(where).startswith(prefix):
        return unquote(where).removeprefix(prefix)
    raise RestoreError(
        f"The log of {folder} lists {where}, which is outside of that folder. If the folder was moved or copied, "
        "`dagster-ckpt relocate-output` lets its log list the files that are there."
    )


def below(folder: str) -> Callable[[str], bool]:
    """Return a check whether a path, in any spelling, lies below the folder."""
    known: dict[str, bool] = {}

    def check(where: str) -> bool:
        parent = where.rpartition("/")[0]
        if parent not in known:
            known[parent] = lies_in(unquote(parent), folder)
        return known[parent]

    return check
