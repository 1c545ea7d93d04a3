"""Fence an unreachable query: prevent it from planning another batch, so that it ends.

Spark plans a batch by writing `offsets/<batch>`, and fails if that entry exists ("Multiple streaming queries are
concurrently using ..."). A fence is such an entry for the first unplanned batch. Spark cannot read it, so no query can
start there; a successor continues from a clone.

The marker `offsets/fenced-at-<batch>` shows it in listings. Written first, it means nothing without the entry: if the
query was faster, the next batch is fenced.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from dagster_ckpt.io.file_io import FileIO

_OFFSETS = "offsets"
_COMMITS = "commits"
_MARK = "fenced-at-"
_HEADER = b"dagster_ckpt fence 1\n"
_POLL_S = 0.25
# Longest time between a query's check and its write.
_SETTLE_S = 0.2
_SETTLE_REMOTE_S = 2.0


@dataclass(frozen=True)
class Fence:
    """Result of fencing.

    Attributes:
        batch_id: No batch from this one on was or will be planned.
        in_flight: The batch before it, if it was not committed in time.
    """

    batch_id: int
    in_flight: int | None


def planned(folder: FileIO) -> list[int]:
    """Ascending; a fence does not count."""
    names = folder.listing(_OFFSETS).names
    return [batch for batch in _numbers(names) if not _is_fenced(folder, batch, names)]


def fenced_at(folder: FileIO) -> int | None:
    names = folder.listing(_OFFSETS).names
    return next((batch for batch in reversed(_numbers(names)) if _is_fenced(folder, batch, names)), None)


def fence(
    folder: FileIO,
    *,
    by: str,
    wait_s: float,
    still_mine: Callable[[], None] = lambda: None,
    step: Callable[[], AbstractContextManager[object]] = nullcontext,
    sleep: Callable[[float], None] = time.sleep,
) -> Fence:
    """Prevent a query from planning another batch, and wait for the batch in flight. Safe to repeat concurrently.

    Args:
        wait_s: How long to wait for the batch in flight, which may still write to its sink.
        still_mine: Called before each step; raises if the caller may not continue.
        step: Entered around the writes, if a successor could run a query there.
    """
    content = _HEADER + json.dumps({"by": by}).encode()
    while True:
        still_mine()
        batch = fenced_at(folder)
        if batch is None:
            batch = max(planned(folder), default=-1) + 1
            with step():
                folder.write(f"{_OFFSETS}/{_MARK}{batch}", [content])
            still_mine()
            with step():
                folder.create_if_absent(f"{_OFFSETS}/{batch}", content)
        # A query that checked before has replaced the fence by now.
        sleep(_SETTLE_S if folder.width == 1 else _SETTLE_REMOTE_S)
        if fenced_at(folder) != batch:
            continue
        in_flight = _await_commit(folder, batch - 1, wait_s, still_mine, sleep)
        if fenced_at(folder) == batch:
            return Fence(batch, in_flight)


def lift_fence(folder: FileIO, batch_id: int) -> None:
    if fenced_at(folder) == batch_id:
        folder.delete(f"{_OFFSETS}/{batch_id}")
        folder.delete(f"{_OFFSETS}/{_MARK}{batch_id}")


def open_fence(folder: FileIO, batch_id: int, planned_entry: bytes) -> None:
    """Replace a fence by the plan of its batch, so that a query can start there.

    The fenced query never plans this batch: an entry of that name exists throughout.
    """
    folder.write(f"{_OFFSETS}/{batch_id}", [planned_entry])
    folder.delete(f"{_OFFSETS}/{_MARK}{batch_id}")


def _await_commit(
    folder: FileIO, batch: int, wait_s: float, still_mine: Callable[[], None], sleep: Callable[[float], None]
) -> int | None:
    waited_s = 0.0
    while batch >= 0:
        if batch in _numbers(folder.listing(_COMMITS).names):
            break
        if waited_s >= wait_s:
            return batch
        still_mine()
        sleep(_POLL_S)
        waited_s += _POLL_S
    return None


def _numbers(names: Set[str]) -> list[int]:
    return sorted(int(name) for name in names if name.isdecimal())


def _is_fenced(folder: FileIO, batch: int, names: Set[str]) -> bool:
    if f"{_MARK}{batch}" not in names:
        return False
    try:
        data = folder.read(f"{_OFFSETS}/{batch}", len(_HEADER))
    except FileNotFoundError:
        return False
    # A partial fence counts: Spark's entries appear atomically and begin differently.
    return _HEADER.startswith(data)
