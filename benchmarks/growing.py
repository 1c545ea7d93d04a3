"""A copy of a live directory that grows as the query would let it grow: file by file, in the order they were made."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


def copy_of(kept: Path, target: Path) -> Path:
    """Copy a kept directory, with its times."""
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", str(kept), str(target)], check=True)
    return target


def grow(live: Path, towards: Path, *, until_ns: int | None = None) -> list[Path]:
    """Let a copy become a later stage of the same directory.

    As Spark does, files are written under another name and renamed.

    Args:
        live: The copy.
        towards: The later stage.
        until_ns: Take only files made until then, and delete none; None takes all there is to take.

    Returns:
        The files that were added or replaced, in the copy.
    """
    added = []
    for path, stat in _files(towards):
        target = live / path
        if until_ns is not None and stat.st_mtime_ns > until_ns:
            continue
        if _is_same(target, stat):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.unfinished")
        shutil.copy2(towards / path, unfinished)
        unfinished.replace(target)
        added.append(target)
    if until_ns is None:
        later = {path for path, _ in _files(towards)}
        for path in [path for path, _ in _files(live) if path not in later]:
            (live / path).unlink()
    return added


def committed_at_ns(directory: Path, batch: int) -> int:
    """When a batch was committed, ns since the epoch: what a restore after it needs was all there."""
    # The checksum beside the commit is a little younger.
    return max((directory / "commits" / name).stat().st_mtime_ns for name in (f"{batch}", f".{batch}.crc"))


def _files(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            yield str(path.relative_to(root)), path.stat()


def _is_same(target: Path, stat: os.stat_result) -> bool:
    try:
        there = target.stat()
    except FileNotFoundError:
        return False
    return (there.st_size, there.st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
