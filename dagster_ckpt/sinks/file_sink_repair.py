"""Repairs the log of a file sink: relocates it after its folder was moved or copied, and rebuilds it from a snapshot.

Both only write entries whose part files exist with the listed length, delete only the Hadoop checksum of an entry that
changes, and are repeatable.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from dagster_ckpt.errors import LiveDirectoryError, SinkRollbackError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.sinks.file_sink_log import (
    LOG,
    Past,
    bare,
    below,
    entry_of,
    has_beginning,
    listed,
    log_entries,
    name_below,
    needed_entries,
    past_of,
    read_log_at_hand,
    url_of,
    write_entries,
)
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry, StillMine
from dagster_ckpt.spark.checkpoint_dir.checksums import fits_hadoop
from dagster_ckpt.spark.checkpoint_dir.file_source import entry_id
from dagster_ckpt.spark.checkpoint_dir.logs import parse_log_lines

_NAMED = 5
_UNIQUE = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Relocation:
    """A log whose paths were written for another folder.

    Attributes:
        files: How many the entries list elsewhere.
        old_place: The folder of the first of them.
    """

    folder: str
    entries: tuple[SinkEntry, ...]
    files: int
    old_place: str | None


def plan_relocation(folder: str) -> Relocation:
    """By the files' unique names and lengths."""
    there = open_file_io(folder)
    names = sorted(
        (name for name in there.list(LOG) if entry_id(name) is not None), key=lambda name: entry_id(name) or 0
    )
    if not names:
        raise SinkRollbackError(f"{folder} has no log: {LOG} is missing or empty. Name the folder of a file sink.")
    by_name: dict[str, list[str]] = defaultdict(list)
    for path, _ in there.find():
        by_name[path.rpartition("/")[2]].append(path)
    is_below, missing, elsewhere = below(folder), set[str](), set[str]()
    entries = []
    for name in names:
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
    """The query must not be running."""
    write_entries(open_file_io(relocation.folder), relocation.entries, still_mine=nullcontext)


def is_moved_log(folder: str, captured: Sequence[SinkEntry]) -> bool:
    """By the uuids in their names."""
    noted = {bare(path) for entry in captured for path in _listed(entry, folder)}
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
    """`unknown` are later batches whose files nothing lists."""

    folder: str
    entries: tuple[SinkEntry, ...]
    batch_id: int
    unknown: range


def plan_rebuilt_log(folder: str, captured: Sequence[SinkEntry], committed: int | None) -> RebuiltLog:
    """From a snapshot and its own later entries; `committed` is the query's newest batch, if known."""
    there = open_file_io(folder)
    at_hand, noted = _intact(there, log_entries(there)), {entry_id(entry.name) or 0: entry for entry in captured}
    for number, entry in noted.items():
        name = at_hand.get(number)
        if name == entry.name and not set(_files(there, name)) <= set(_listed(entry, folder)):
            raise SinkRollbackError(
                f"The log of {folder} is not rebuilt, nothing was changed: its entry {name} lists other files than the "
                "snapshot. It is of another run of the query. Go back to a snapshot with start_from=...: that rolls "
                "the sink back."
            )
    whole = {**at_hand, **{number: entry.name for number, entry in noted.items()}}
    # A later compact entry has everything before it.
    needed = needed_entries(whole)
    reached = max(noted, default=-1)
    if needed.start > reached and has_beginning(whole):
        reached = needed.start
    while reached + 1 in whole:
        reached += 1
    last = max(reached, -1 if committed is None else committed)
    listed = {path: size for entry in captured for path, size in _listed(entry, folder).items()}
    for number in range(max(noted, default=-1) + 1, reached + 1):
        listed |= _files(there, whole[number]) if number in at_hand else {}
    _check_files(folder, there, listed)
    return RebuiltLog(folder, tuple(captured), reached, range(reached + 1, last + 1))


def rebuild_log(rebuilt: RebuiltLog, still_mine: StillMine) -> None:
    write_entries(open_file_io(rebuilt.folder), rebuilt.entries, still_mine=still_mine)


def is_intact(there: FileIO, name: str) -> bool:
    """It can be parsed and matches Hadoop's checksum, if any."""
    data = there.read(f"{LOG}/{name}")
    try:
        parse_log_lines(data, name)
    except LiveDirectoryError:
        return False
    return fits_hadoop(there, f"{LOG}/{name}", data) is not False


def _intact(there: FileIO, names: Mapping[int, str]) -> dict[int, str]:
    return {number: name for number, name in names.items() if is_intact(there, name)}


def _check_files(folder: str, there: FileIO, listed: Mapping[str, object]) -> None:
    bad = sorted(path for path, size in listed.items() if there.size(name_below(folder, path)) != size)
    if bad:
        raise SinkRollbackError(
            f"The log of {folder} is not rebuilt, nothing was changed: {len(bad)} files that it must list are not "
            f"there with their lengths: {_some(bad)}. Put them back, or start from empty into a new folder."
        )


def _files(there: FileIO, name: str) -> dict[str, object]:
    return _listed(SinkEntry(name, there.read(f"{LOG}/{name}")), there.url)


def _listed(entry: SinkEntry, folder: str) -> dict[str, object]:
    return listed(entry.data, f"{folder}/{LOG}/{entry.name}")


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return f"{', '.join(paths[:_NAMED])}{more}"
