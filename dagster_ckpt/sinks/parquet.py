"""Spark's file sink: compare its log with a snapshot's, forecast replays, and fork its folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from dagster_ckpt.config.storage_path import local_path
from dagster_ckpt.errors import CkptError, RestoreError, StorageAccessError
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.sinks.effect import Replay, SinkEffect, SinkForecast
from dagster_ckpt.spark.checkpoint_dir.file_sink_log import LOG, SinkEntry, StillMine, own_past, roll_back
from dagster_ckpt.spark.checkpoint_dir.file_source import COMPACT, entry_id
from dagster_ckpt.spark.checkpoint_dir.logs import parse_log_lines
from dagster_ckpt.spark.query.output import same_folder
from dagster_ckpt.spark.query.sinks import file_sink_path


class Past(StrEnum):
    """Relation of the current log to that of a snapshot.

    NONE: There is no current log.
    SAME: Up to the snapshot's batch it lists exactly the same files.
    PART: It ends at or before the snapshot's batch, and lists some of the snapshot's files and no
        others.
    SHARED: They have files in common, but one lists files up to that batch that the other does not:
        the current log has diverged in between, for example by a rewind.
    STRANGER: They have no file in common: another query, or another start of this one, wrote it.
    """

    NONE = "NONE"
    SAME = "SAME"
    PART = "PART"
    SHARED = "SHARED"
    STRANGER = "STRANGER"


@dataclass(frozen=True)
class SinkLogAtHand:
    """The files that the log of a file sink lists.

    Attributes:
        last_batch: Its newest batch; None if there is no log.
        up_to: Files listed in its entries up to the requested batch.
        later: Files listed in its later entries; after a compaction these include all earlier
            files.
        compacted: Whether one of the later entries is a compact one.
        is_later: Whether there are later entries.
    """

    last_batch: int | None
    up_to: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()
    compacted: bool = False
    is_later: bool = False

    @property
    def is_blank(self) -> bool:
        """Whether the log exists and lists no file."""
        return self.last_batch is not None and not self.up_to | self.later


def past_of(at_hand: SinkLogAtHand, noted: frozenset[str]) -> Past:
    """Compare the current log with the files that a snapshot lists. A pure function."""
    if at_hand.last_batch is None:
        return Past.NONE
    known = at_hand.up_to | at_hand.later
    if not at_hand.up_to <= noted:
        # Up to the batch, it lists files that the snapshot does not.
        return Past.SHARED if noted & known else Past.STRANGER
    if not noted or noted <= known:
        return Past.SAME
    if not at_hand.is_later:
        return Past.PART
    # Files of the snapshot are no longer listed. In a compacted log they may have exceeded the
    # sink's retention time.
    return (Past.SAME if at_hand.compacted else Past.SHARED) if noted & known else Past.STRANGER


def read_log_at_hand(path: str, batch_id: int) -> SinkLogAtHand:
    """Read the log of a file sink.

    Args:
        path: Its folder.
        batch_id: The batch up to which to compare it.

    Raises:
        LiveDirectoryError: An entry cannot be parsed.
        StorageAccessError: The folder cannot be reached.
    """
    folder = open_file_io(path)
    names: dict[int, str] = {}
    for name in folder.list(LOG):
        number = entry_id(name)
        if number is not None:
            names[number] = name if name.endswith(COMPACT) else names.get(number, name)
    if not names:
        return SinkLogAtHand(None)
    up_to: set[str] = set()
    later: set[str] = set()
    for number, name in _needed(names, batch_id).items():
        entry = SinkEntry(name, folder.read(f"{LOG}/{name}"))
        (up_to if number <= batch_id else later).update(files_of([entry], path))
    compacted = any(name.endswith(COMPACT) for number, name in names.items() if number > batch_id)
    return SinkLogAtHand(
        max(names), frozenset(up_to), frozenset(later), compacted=compacted, is_later=max(names) > batch_id
    )


def files_of(entries: Sequence[SinkEntry], path: str) -> frozenset[str]:
    """Files that entries of a log list.

    Raises:
        LiveDirectoryError: An entry cannot be parsed.
    """
    lines = [line for entry in entries for line in parse_log_lines(entry.data, f"{path}/{LOG}/{entry.name}")]
    return frozenset(str(line.get("path")) for line in lines)


def _needed(names: Mapping[int, str], batch_id: int) -> dict[int, str]:
    """The entries needed to list all files up to the batch, and all later files."""
    compacts = [number for number, name in names.items() if name.endswith(COMPACT)]
    below = max((number for number in compacts if number <= batch_id), default=-1)
    newest = max(compacts, default=-1)
    return {n: name for n, name in names.items() if below <= n <= batch_id or n >= max(newest, batch_id + 1)}


def forecast_file_sink(sink: str, replay: Replay) -> SinkForecast:
    """Forecast a replay for a file sink that the guard allows a start to roll back; ownership is checked there.

    Args:
        sink: Spark's name for it.
        replay: The replay that it will see.
    """
    path = file_sink_path(sink) or ""
    try:
        folder = open_file_io(path)
        names = {number: name for name in folder.list(LOG) if (number := entry_id(name)) is not None}
        if replay.to_batch < 0:
            return SinkForecast(sink, SinkEffect.EXACT, "Its log is emptied: readers see what the new run writes.")
        if replay.log_entries is None:
            own_past([sink], replay.to_batch)
        elif (entries := _noted(path, replay.log_entries)) is None:
            return _not_in_the_snapshot(sink, max(names, default=-1), replay)
        elif not folder.exists() and entries:
            return SinkForecast(
                sink,
                SinkEffect.LOSE,
                f"The folder is gone, and with it the rows of all batches up to {replay.to_batch}.",
                "Put the folder back.",
            )
    except StorageAccessError as error:
        return SinkForecast(sink, SinkEffect.UNREACHABLE, f"It has to be rolled back and cannot be reached: {error}")
    except CkptError as error:
        return SinkForecast(sink, SinkEffect.UNREACHABLE, f"It cannot be rolled back: {error}")
    undone = sum(1 for number in names if number > replay.to_batch)
    reason = f"Its log is rolled back to batch {replay.to_batch}: {undone} entries go"
    return SinkForecast(sink, SinkEffect.EXACT, f"{reason}, and readers see each row once.")


def _noted(path: str, log_entries: Mapping[str, Sequence[SinkEntry]]) -> Sequence[SinkEntry] | None:
    # The catalog may contain the folder in Spark's spelling, and the snapshot in the user's.
    return next((entries for noted, entries in log_entries.items() if same_folder(noted, path)), None)


def _not_in_the_snapshot(sink: str, last_batch: int, replay: Replay) -> SinkForecast:
    if last_batch <= replay.to_batch:
        return SinkForecast(sink, SinkEffect.EXACT, f"It holds no batch after {replay.to_batch}.")
    return SinkForecast(
        sink,
        SinkEffect.LOSE,
        "The snapshot was taken before the query wrote there, so the sink is not rolled back: it passes over batches "
        "up "
        f"to {last_batch} whatever is in them.",
        "Write to a new folder.",
    )


# Characters that Hadoop leaves unescaped in the path of a URI.
_SAFE = "/=:@!$&'()*+,;~"


def fork_output(
    old: str,
    new: str,
    batch_id: int,
    entries: Sequence[SinkEntry],
    *,
    still_mine: StillMine,
    may_link: bool = True,
) -> None:
    """Copy the rows of a folder up to a batch to another folder; can be interrupted and repeated.

    Args:
        old: Folder of the file sink.
        new: Folder of the fork; created if it does not exist.
        batch_id: The batch.
        entries: The log of `old` up to the batch.
        still_mine: Entered around each change of a file; raises if this process is no longer the
            writer.
        may_link: Hard-link files on one disk, so that they share their bytes; otherwise copy them.

    Raises:
        RestoreError: The log lists a file that is missing or outside of the folder.
        LiveDirectoryError: An entry of the log cannot be parsed.
        SinkRollbackError: The log of the new folder cannot be written.
        StorageAccessError: A file cannot be read or written.
    """
    target = open_file_io(new)
    target.make()
    moved = []
    for entry in entries:
        with still_mine():
            # The copied files are new or exist already, so nothing of a successor is overwritten.
            pass
        lines = parse_log_lines(entry.data, f"{old}/{entry.name}")
        texts = [
            "v1",
            *(json.dumps(_moved(old, new, dict(line), may_link=may_link), separators=(",", ":")) for line in lines),
        ]
        moved.append(SinkEntry(entry.name, "\n".join(texts).encode()))
    # Make the files durable first: a log that lists them may be read at once.
    target.flush_all()
    roll_back(new, batch_id, moved, still_mine=still_mine)


def copied_files(old: str, new: str, entries: Sequence[SinkEntry]) -> frozenset[str]:
    """The files that the log of a folder lists after it got the rows of another one.

    Raises:
        RestoreError: The log lists a file outside of the folder.
        LiveDirectoryError: An entry of the log cannot be parsed.
    """
    return frozenset(_place(new, _below(old, where)) for where in files_of(entries, old))


def strange_file(new: str, old: str, entries: Sequence[SinkEntry] = ()) -> str | None:
    """A file in a folder that `fork_output` would not have created, or None if there is none.

    Args:
        new: The folder.
        old: Folder of the file sink whose rows it gets.
        entries: The log of `old` up to the copied rows; if empty, the folder must be empty.

    Raises:
        RestoreError: The log lists a file outside of the folder.
        LiveDirectoryError: An entry of the log cannot be parsed.
        StorageAccessError: The folder cannot be reached.
    """
    known = {_below(old, where) for where in files_of(entries, old)} | {f"{LOG}/{entry.name}" for entry in entries}
    return next((path for path, _ in open_file_io(new).find() if path not in known), None)


def _moved(old: str, new: str, line: dict[str, Any], *, may_link: bool) -> dict[str, Any]:
    where = str(line.get("path", ""))
    name = _below(old, where)
    try:
        _bring(old, new, name, may_link=may_link)
    except FileNotFoundError as error:
        raise RestoreError(
            f"{where} is gone, though the log of {old} names it, so the output cannot be forked. Fork without it."
        ) from error
    return {**line, "path": _place(new, name)}


def _place(new: str, name: str) -> str:
    root = local_path(new)
    place = f"file://{quote(str(root), safe=_SAFE)}" if root is not None else new.rstrip("/")
    return f"{place}/{quote(name, safe=_SAFE)}"


def _below(old: str, where: str) -> str:
    root, file = local_path(old), local_path(unquote(where))
    if root is not None and file is not None and file.is_relative_to(root):
        return file.relative_to(root).as_posix()
    prefix = f"{old.rstrip('/')}/"
    if root is None and unquote(where).startswith(prefix):
        return unquote(where).removeprefix(prefix)
    raise RestoreError(f"The log of {old} names {where}, which does not lie there, so the output cannot be forked.")


def _bring(old: str, new: str, name: str, *, may_link: bool) -> None:
    source, target = open_file_io(old), open_file_io(new)
    if may_link and isinstance(source, LocalFileIO) and isinstance(target, LocalFileIO):
        _link(source.root / name, target.root / name)
        return
    with source.open(name) as stream:
        target.write(name, iter(lambda: stream.read(1 << 20), b""))


def _link(source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            return
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError:
            # Another device, or a file system without hard links.
            unfinished = target.with_name(f".{target.name}.tmp")
            shutil.copyfile(source, unfinished)
            unfinished.replace(target)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageAccessError(
            f"Cannot write {target}: {error}. Check space there, and that this process has rights to it."
        ) from error
