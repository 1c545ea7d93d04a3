"""A file sink's folder with the rows of another one up to a batch.

The files themselves are linked (on one local disk) or copied, and the log names them where they then are: Spark's
readers pass over a file that a log names outside of its own folder (`PartitioningAwareFileIndex.allFiles`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from dagster_ckpt.errors import RestoreError, StorageAccessError
from dagster_ckpt.spark.file_sink import LOG, SinkEntry, StillMine, roll_back
from dagster_ckpt.spark.folder import local_path
from dagster_ckpt.spark.local_folder import LocalFolder
from dagster_ckpt.spark.logs import parse_log_lines
from dagster_ckpt.spark.opening import open_folder
from dagster_ckpt.spark.sink_past import files_of

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
