"""Give a fork the rows of a file sink: copy its files up to a batch to another folder, and write the log there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, unquote

from dagster_ckpt.config.storage_path import local_path
from dagster_ckpt.errors import RestoreError
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.sinks.file_sink_log import LOG, files_of, roll_back
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry, StillMine
from dagster_ckpt.spark.checkpoint_dir.logs import parse_log_lines

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
        old: FileIO of the file sink.
        new: FileIO of the fork; created if it does not exist.
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
        old: FileIO of the file sink whose rows it gets.
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
    # A file that an interrupted fork brought is whole, and its name is unique.
    if may_link and (target.size(name) is not None or target.adopt(name, source, name)):
        return
    with source.open(name) as stream:
        target.write(name, iter(lambda: stream.read(1 << 20), b""))
