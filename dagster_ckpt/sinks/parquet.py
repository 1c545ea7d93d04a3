"""Spark's file sink: whose log it has, what it does with repeated batches, and forking its folder."""

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

from dagster_ckpt.errors import CkptError, RestoreError, StorageAccessError
from dagster_ckpt.io.folder import local_path
from dagster_ckpt.io.local_folder import LocalFolder
from dagster_ckpt.io.remote_folder import open_folder
from dagster_ckpt.sinks.effect import Replay, SinkEffect, SinkForecast
from dagster_ckpt.spark.checkpoint_dir.file_sink_log import LOG, SinkEntry, StillMine, roll_back
from dagster_ckpt.spark.checkpoint_dir.file_source import COMPACT, entry_id
from dagster_ckpt.spark.checkpoint_dir.logs import parse_log_lines
from dagster_ckpt.spark.checkpoint_dir.rewind import own_past
from dagster_ckpt.spark.query.output import same_folder
from dagster_ckpt.spark.query.sinks import file_sink_path


class Past(StrEnum):
    """How the log at hand stands to that of a snapshot.

    NONE: There is no log at hand.
    SAME: Up to the snapshot's batch it names what the snapshot names, and nothing else.
    PART: It ends where the snapshot does or before, and names nothing that the snapshot does not, but not all of it.
    SHARED: They have files in common, and one names files up to that batch that the other does not: the log at hand
        went another way in between, as after a rewind.
    STRANGER: They have no file in common: another query, or another beginning, wrote it.
    """

    NONE = "NONE"
    SAME = "SAME"
    PART = "PART"
    SHARED = "SHARED"
    STRANGER = "STRANGER"


@dataclass(frozen=True)
class SinkLogAtHand:
    """What the log of a file sink names.

    Attributes:
        last_batch: Its newest batch; None where there is no log.
        up_to: Files that its entries up to the batch asked for name.
        later: Files that its later entries name, which after a compaction are all from before as well.
        compacted: Whether one of the later entries is a compact one.
        is_later: Whether there are later entries at all.
    """

    last_batch: int | None
    up_to: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()
    compacted: bool = False
    is_later: bool = False

    @property
    def is_blank(self) -> bool:
        """Whether it is there, and names no file."""
        return self.last_batch is not None and not self.up_to | self.later


def past_of(at_hand: SinkLogAtHand, noted: frozenset[str]) -> Past:
    """Compare the log at hand with the files that a snapshot notes. Pure."""
    if at_hand.last_batch is None:
        return Past.NONE
    known = at_hand.up_to | at_hand.later
    if not at_hand.up_to <= noted:
        # It names, up to the batch, what the snapshot does not know.
        return Past.SHARED if noted & known else Past.STRANGER
    if not noted or noted <= known:
        return Past.SAME
    if not at_hand.is_later:
        return Past.PART
    # Files of the snapshot are named no more. Of a compacted log they may have passed the sink's retention.
    return (Past.SAME if at_hand.compacted else Past.SHARED) if noted & known else Past.STRANGER


def read_log_at_hand(path: str, batch_id: int) -> SinkLogAtHand:
    """Read the log of a file sink.

    Args:
        path: Its folder.
        batch_id: The batch up to which it is compared.

    Raises:
        LiveDirectoryError: An entry cannot be read.
        StorageAccessError: The folder cannot be reached.
    """
    folder = open_folder(path)
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
    """Files that entries of a log name.

    Raises:
        LiveDirectoryError: An entry cannot be read.
    """
    lines = [line for entry in entries for line in parse_log_lines(entry.data, f"{path}/{LOG}/{entry.name}")]
    return frozenset(str(line.get("path")) for line in lines)


def _needed(names: Mapping[int, str], batch_id: int) -> dict[int, str]:
    """Entries that name all there is: those from the newest compact one up to the batch, and from the newest of all."""
    compacts = [number for number, name in names.items() if name.endswith(COMPACT)]
    below = max((number for number in compacts if number <= batch_id), default=-1)
    newest = max(compacts, default=-1)
    return {n: name for n, name in names.items() if below <= n <= batch_id or n >= max(newest, batch_id + 1)}


def forecast_file_sink(sink: str, replay: Replay) -> SinkForecast:
    """Say what a file sink will do that the guard lets a start bring back: whose it is was judged there.

    Args:
        sink: What Spark calls it.
        replay: What it will see.
    """
    path = file_sink_path(sink) or ""
    try:
        folder = open_folder(path)
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
    # The catalog may have the folder as Spark spells it, and the snapshot as a person does.
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


# What Hadoop leaves as it is in the path of a URI.
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
    """Give a folder the rows that another one has up to a batch; may be cut off anywhere and done again.

    Args:
        old: Folder of the file sink.
        new: Folder of the fork's; made if it is not there.
        batch_id: The batch.
        entries: The log of `old` up to the batch.
        still_mine: Entered around each change of a file; raises where this process is not the writer any more.
        may_link: Link files on one disk, so that they share their bytes; else copy them.

    Raises:
        RestoreError: The log names a file that is gone, or that lies elsewhere.
        LiveDirectoryError: An entry of the log cannot be read.
        SinkRollbackError: The log of the new folder cannot be written.
        StorageAccessError: A file cannot be read or written.
    """
    target = open_folder(new)
    target.make()
    moved = []
    for entry in entries:
        with still_mine():
            # What is brought is new, or there already: it takes nothing from a successor.
            pass
        lines = parse_log_lines(entry.data, f"{old}/{entry.name}")
        texts = [
            "v1",
            *(json.dumps(_moved(old, new, dict(line), may_link=may_link), separators=(",", ":")) for line in lines),
        ]
        moved.append(SinkEntry(entry.name, "\n".join(texts).encode()))
    # The files first, and for good: a log that names them may be read at once.
    target.flush_all()
    roll_back(new, batch_id, moved, still_mine=still_mine)


def copied_files(old: str, new: str, entries: Sequence[SinkEntry]) -> frozenset[str]:
    """The files that the log of a folder names once it was given the rows of another one.

    Raises:
        RestoreError: The log names a file that lies elsewhere.
        LiveDirectoryError: An entry of the log cannot be read.
    """
    return frozenset(_place(new, _below(old, where)) for where in files_of(entries, old))


def strange_file(new: str, old: str, entries: Sequence[SinkEntry] = ()) -> str | None:
    """A file in a folder that `fork_output` would not have brought there, or None where there is none.

    Args:
        new: The folder.
        old: Folder of the file sink whose rows it is to have.
        entries: The log of `old`, as far as its rows are brought; none of it: the folder has to be empty.

    Raises:
        RestoreError: The log names a file that lies elsewhere.
        LiveDirectoryError: An entry of the log cannot be read.
        StorageAccessError: The folder cannot be reached.
    """
    known = {_below(old, where) for where in files_of(entries, old)} | {f"{LOG}/{entry.name}" for entry in entries}
    return next((path for path, _ in open_folder(new).files() if path not in known), None)


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
    source, target = open_folder(old), open_folder(new)
    if may_link and isinstance(source, LocalFolder) and isinstance(target, LocalFolder):
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
            # Another device, or a file system without links.
            unfinished = target.with_name(f".{target.name}.tmp")
            shutil.copyfile(source, unfinished)
            unfinished.replace(target)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageAccessError(
            f"Cannot write {target}: {error}. Check space there, and that this process has rights to it."
        ) from error
