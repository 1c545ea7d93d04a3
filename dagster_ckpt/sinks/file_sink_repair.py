"""Find damage in the log of a file sink, for the doctor and for starts, and repair it.

A log of another query or timeline is not damaged: only `sink_ownership.py` judges it.

A repair relocates the log of a moved or copied folder, or rebuilds it from a snapshot. It only writes entries whose
part files exist with the listed length, deletes only Hadoop's checksum of a changed entry, and is repeatable.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import dropwhile, islice

from dagster_ckpt.errors import LiveDirectoryError, SinkRollbackError, UnknownLayoutError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.sinks.file_sink_log import (
    LOG,
    Past,
    bare,
    below,
    entry_of,
    has_beginning,
    listed_by,
    log_entries,
    name_below,
    needed_entries,
    past_of,
    read_entry,
    read_log_at_hand,
    url_of,
    write_entries,
)
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry, StillMine
from dagster_ckpt.spark.checkpoint_dir.checksums import checksum_file, fits_hadoop
from dagster_ckpt.spark.checkpoint_dir.file_source import COMPACT, entry_id, entry_ids
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, OFFSETS, batch_ids
from dagster_ckpt.spark.checkpoint_dir.logs import parse_log_lines
from dagster_ckpt.spark.doctor.finding import MOST_REPORTED_GAPS, Code, Finding, Subject, error, note, warning
from dagster_ckpt.values.safe_parsing import from_json

_SHOWN = 3
_NAMED = 5
_HEAD_BYTES = 16_384
_Files = Mapping[str, object]
_UNIQUE = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class DamagedLog:
    folder: str
    found: str


def damaged_log(path: str, captured: Sequence[SinkEntry], committed: int | None = None) -> DamagedLog | None:
    """Describe the damage; None if the log is whole, or its rest is not this stream's.

    `captured` is the log in a snapshot, `committed` a batch that the sink must have.
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
    return _absent(open_file_io(path), _Noted.of(captured, path).files)


def missing_of_left_timeline(path: str, captured: Sequence[SinkEntry]) -> list[str]:
    """Name the files in a snapshot that neither the log now lists nor exist.

    The retention time of a sink drops only the oldest files, so those before the first that it still lists are not
    looked for.
    """
    noted = _Noted.of(captured, path)
    at_hand = read_log_at_hand(path, noted.last)
    listed_now = {bare(file) for file in at_hand.up_to | at_hand.later}
    kept = list(dropwhile(lambda name: name not in listed_now, noted.files))
    return _absent(open_file_io(path), {name: noted.files[name] for name in kept if name not in listed_now})


@dataclass(frozen=True)
class _Noted:
    last: int
    entries: Mapping[str, _Files]
    files: _Files

    @staticmethod
    def of(captured: Sequence[SinkEntry], path: str) -> _Noted:
        in_order = sorted(captured, key=lambda each: entry_id(each.name) or 0)
        entries = {each.name: _bare_files(each, path) for each in in_order}
        return _Noted(
            max((entry_id(name) or 0 for name in entries), default=-1),
            entries,
            {name: size for files in entries.values() for name, size in files.items()},
        )


class _Stranger:
    """An intact entry of another query or timeline."""


class _Doubt(str):
    """An altered entry: only the rest of the log shows whose it is."""

    __slots__ = ()


def _trouble(folder: FileIO, name: str, noted: _Noted) -> str | _Stranger | None:
    entry = f"{LOG}/{name}"
    try:
        data = folder.read(entry)
    except FileNotFoundError:
        return None
    fits = fits_hadoop(folder, entry, data)
    if fits is False:
        return f"entry {name} does not match Hadoop's checksum beside it"
    try:
        files = _bare_files(SinkEntry(name, data), folder.url)
    except UnknownLayoutError as trouble:
        return str(trouble) if name in noted.entries else _Stranger()
    except LiveDirectoryError as trouble:
        return str(trouble)
    known = noted.entries.get(name)
    if known is not None and files.keys() <= known.keys():
        return None if files == known else f"entry {name} does not list what it listed for the snapshot"
    if known is None and not _is_anothers(name, files, noted):
        is_later = name.endswith(COMPACT) and (entry_id(name) or 0) > noted.last
        # The retention time of a sink drops only the oldest files.
        is_cut = is_later and bool(files.keys() & noted.files.keys()) and list(noted.files)[-1] not in files
        return f"entry {name} lacks files that were listed before it" if is_cut else None
    if fits is True or not _absent(folder, files):
        return _Stranger()
    return _Doubt(f"entry {name} lists files that neither the snapshot has nor exist")


def _is_anothers(name: str, files: _Files, noted: _Noted) -> bool:
    if (entry_id(name) or 0) <= noted.last:
        return not files.keys() <= noted.files.keys()
    # A later compact entry lists all files before it, within the sink's retention time.
    return name.endswith(COMPACT) and bool(noted.files) and not files.keys() & noted.files.keys()


def _absent(folder: FileIO, files: _Files) -> list[str]:
    there = {path.rpartition("/")[2]: path for path, _ in folder.find()} if files else {}
    return sorted(
        name for name, size in files.items() if name not in there or size not in (None, folder.size(there[name]))
    )


def _bare_files(entry: SinkEntry, folder: str) -> _Files:
    return {bare(file): size for file, size in listed_by(entry, folder).items()}


class LogTrouble(StrEnum):
    """Why a log cannot be continued.

    GAP: An entry that readers and the next compaction need is missing.
    ELSEWHERE: It lists files outside its folder.
    """

    GAP = "GAP"
    ELSEWHERE = "ELSEWHERE"


def log_trouble(path: str, up_to: int | None = None) -> LogTrouble | None:
    """Look at the names of entries, and at their first lines, which show a moved folder."""
    folder = open_file_io(path)
    names, is_below = log_entries(folder), below(path)
    if up_to is not None:
        names = {number: name for number, name in names.items() if number <= up_to}
    needed = needed_entries(names)
    if names and (not has_beginning(names) or any(number not in names for number in needed)):
        return LogTrouble.GAP
    for number in needed:
        try:
            head = folder.read(f"{LOG}/{names[number]}", _HEAD_BYTES)
        except FileNotFoundError:
            # Spark has compacted the log since it was listed.
            continue
        for line in head.split(b"\n")[1:3]:
            with suppress(ValueError, AttributeError):
                if not is_below(str(from_json(line).get("path"))):
                    return LogTrouble.ELSEWHERE
    return None


def examine_log(subject: Subject, folder: FileIO) -> Iterator[Finding]:
    # Read in the reverse order of a running query's writes.
    committed = max(batch_ids(subject.folder, COMMITS), default=-1)
    names = log_entries(folder)
    planned = max(batch_ids(subject.folder, OFFSETS), default=-1)
    last = max(names, default=-1)
    where = f"{folder.url}/{LOG}"
    if last > planned:
        yield error(
            Code.SINK_LOG_AHEAD,
            where,
            f"The sink has batches up to {last}, but the checkpoint has planned only {planned}: Spark silently skips "
            f"every batch up to {last}, and rows are lost if a batch has other boundaries the second time.",
        )
    has_ids = subject.commit_entry is not None and bool(subject.commit_entry.state_ids)
    # A running query may have committed it meanwhile.
    if has_ids and last == planned == committed + 1 > max(batch_ids(subject.folder, COMMITS), default=-1):
        yield note(
            Code.SINK_HAS_BATCH_IN_FLIGHT,
            f"{where}/{names[last]}",
            f"The sink has batch {last}, which is not committed, and state is in checkpoint format v2. Unless a "
            "query runs there, Spark would skip the batch without running it and fail, at every start: assertion "
            "failed: CheckpointInfo length: 0.",
        )
    if last < committed:
        yield warning(
            Code.SINK_LOG_BEHIND,
            where,
            f"Batch {committed} is committed, but the sink has batches only up to {last}: rows were lost, or the "
            "output folder was replaced or rolled back on its own.",
        )
    yield from _examine_entries(folder, names)


def _examine_entries(folder: FileIO, names: Mapping[int, str]) -> Iterator[Finding]:
    where, is_below = f"{folder.url}/{LOG}", below(folder.url)
    needed, elsewhere = needed_entries(names), 0
    if names and not has_beginning(names):
        yield error(
            Code.SINK_LOG_GAP,
            f"{where}/{needed.start - 1}{COMPACT}",
            f"The sink's log begins with entry {needed.start}, and no compact entry has what came before: readers and "
            "the next compaction fail, and no snapshot can be taken.",
        )
    missing = (number for number in needed if number not in names)
    for number in sorted({*islice(missing, MOST_REPORTED_GAPS), *(number for number in names if number in needed)}):
        if number not in names:
            yield error(
                Code.SINK_LOG_GAP,
                f"{where}/{number}",
                f"The sink's log has entries up to {needed.stop - 1}, but not this one: readers and the next "
                "compaction fail, and no snapshot can be taken.",
            )
            continue
        entry = f"{LOG}/{names[number]}"
        try:
            data = folder.read(entry)
            if fits_hadoop(folder, entry, data) is False:
                yield error(
                    Code.CHECKSUM_DIFFERS,
                    f"{folder.url}/{entry}",
                    f"It does not match Hadoop's checksum {checksum_file(entry)}: it was altered after it was written, "
                    "and readers fail on it.",
                )
            lines = parse_log_lines(data, f"{folder.url}/{entry}")
        except UnknownLayoutError as trouble:
            yield error(Code.UNKNOWN_VERSION, f"{folder.url}/{entry}", str(trouble))
        except LiveDirectoryError as trouble:
            yield error(Code.SINK_LOG_UNREADABLE, f"{folder.url}/{entry}", str(trouble))
        except FileNotFoundError:
            continue
        else:
            foreign = [str(line.get("path")) for line in lines if not is_below(str(line.get("path")))]
            if foreign and not elsewhere:
                yield error(
                    Code.SINK_LOG_ELSEWHERE,
                    where,
                    f"The sink's log lists files that do not lie in its folder, such as {foreign[0]}: the output was "
                    "moved or copied. Readers miss these rows, or read another folder's files.",
                )
            elsewhere += len(foreign)


@dataclass(frozen=True)
class Relocation:
    """A log whose paths were written for another folder: `files` of them, the first in `old_place`."""

    folder: str
    entries: tuple[SinkEntry, ...]
    files: int
    old_place: str | None


def plan_relocation(folder: str) -> Relocation:
    there = open_file_io(folder)
    names = entry_ids(there.list(LOG))
    if not names:
        raise SinkRollbackError(f"{folder} has no log: {LOG} is missing or empty. Name the folder of a file sink.")
    by_name: dict[str, list[str]] = defaultdict(list)
    for path, _ in there.find():
        by_name[path.rpartition("/")[2]].append(path)
    is_below, missing, elsewhere = below(folder), set[str](), set[str]()
    entries = []
    for name in sorted(names, key=names.__getitem__):
        lines, changed = [], False
        for line in parse_log_lines(there.read(f"{LOG}/{name}"), f"{folder}/{LOG}/{name}"):
            where = str(line.get("path"))
            if is_below(where):
                lines.append(line)
                continue
            found = [path for path in by_name[bare(where)] if there.size(path) == line.get("size")]
            if len(found) == 1:
                elsewhere.add(where)
                changed = True
                lines.append({**line, "path": url_of(folder, found[0])})
            else:
                missing.add(where)
        entries += [entry_of(name, lines)] if changed else []
    if missing:
        raise SinkRollbackError(
            f"The log of {folder} is not relocated, nothing was changed: {len(missing)} files that it lists are not "
            f"there with the length that it lists: {_some(sorted(missing))}. Move or copy them into the folder first."
        )
    first = min(elsewhere, default=None)
    return Relocation(folder, tuple(entries), len(elsewhere), None if first is None else first.rpartition("/")[0])


def relocate(relocation: Relocation) -> None:
    """Write the planned entries; the query must not be running."""
    write_entries(open_file_io(relocation.folder), relocation.entries, still_mine=nullcontext)


def is_moved_log(folder: str, captured: Sequence[SinkEntry]) -> bool:
    noted = {bare(path) for entry in captured for path in listed_by(entry, folder)}
    last = max((entry_id(entry.name) or 0 for entry in captured), default=-1)
    try:
        at_hand = read_log_at_hand(folder, last)
    except LiveDirectoryError:
        return False
    by_name = replace(at_hand, up_to=frozenset(map(bare, at_hand.up_to)), later=frozenset(map(bare, at_hand.later)))
    is_unique = bool(noted) and all(_UNIQUE.search(name) for name in noted)
    return is_unique and past_of(by_name, frozenset(noted)) is Past.SAME


def relocated(captured: Sequence[SinkEntry], old: str, new: str) -> list[SinkEntry]:
    return [
        entry_of(
            entry.name,
            [
                {**line, "path": url_of(new, name_below(old, str(line.get("path"))))}
                for line in parse_log_lines(entry.data, f"{old}/{LOG}/{entry.name}")
            ],
        )
        for entry in captured
    ]


@dataclass(frozen=True)
class RebuiltLog:
    """A log rebuilt up to `batch_id`; nothing lists the files of the `unknown` later batches."""

    folder: str
    entries: tuple[SinkEntry, ...]
    batch_id: int
    unknown: range


def plan_rebuilt_log(folder: str, captured: Sequence[SinkEntry], committed: int | None) -> RebuiltLog:
    """Plan from a snapshot and later entries; `committed` is the query's newest batch, if known."""
    there = open_file_io(folder)
    at_hand, noted = _intact(there, log_entries(there)), {entry_id(entry.name) or 0: entry for entry in captured}
    for number, entry in noted.items():
        name = at_hand.get(number)
        if name == entry.name and not set(_files(there, name)) <= set(listed_by(entry, folder)):
            raise SinkRollbackError(
                f"The log of {folder} is not rebuilt, nothing was changed: its entry {name} lists other files than the "
                "snapshot. It is of another run of the query. Go back to a snapshot with start_from=...: that rolls "
                "the sink back."
            )
    whole = {**at_hand, **{number: entry.name for number, entry in noted.items()}}
    needed = needed_entries(whole)
    reached = max(noted, default=-1)
    if needed.start > reached and has_beginning(whole):
        reached = needed.start
    while reached + 1 in whole:
        reached += 1
    last = max(reached, -1 if committed is None else committed)
    files = {path: size for entry in captured for path, size in listed_by(entry, folder).items()}
    for number in range(max(noted, default=-1) + 1, reached + 1):
        files |= _files(there, whole[number]) if number in at_hand else {}
    _check_files(folder, there, files)
    return RebuiltLog(folder, tuple(captured), reached, range(reached + 1, last + 1))


def rebuild_log(rebuilt: RebuiltLog, still_mine: StillMine) -> None:
    write_entries(open_file_io(rebuilt.folder), rebuilt.entries, still_mine=still_mine)


def is_intact(there: FileIO, name: str) -> bool:
    data = there.read(f"{LOG}/{name}")
    try:
        parse_log_lines(data, name)
    except LiveDirectoryError:
        return False
    return fits_hadoop(there, f"{LOG}/{name}", data) is not False


def _intact(there: FileIO, names: Mapping[int, str]) -> dict[int, str]:
    return {number: name for number, name in names.items() if is_intact(there, name)}


def _check_files(folder: str, there: FileIO, files: _Files) -> None:
    bad = sorted(path for path, size in files.items() if there.size(name_below(folder, path)) != size)
    if bad:
        raise SinkRollbackError(
            f"The log of {folder} is not rebuilt, nothing was changed: {len(bad)} files that it must list are not "
            f"there with their lengths: {_some(bad)}. Put them back, or start from empty into a new folder."
        )


def _files(there: FileIO, name: str) -> dict[str, object]:
    return listed_by(read_entry(there, name), there.url)


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return f"{', '.join(paths[:_NAMED])}{more}"
