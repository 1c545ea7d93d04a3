"""Fencing off a query that cannot be reached: its next batch cannot be planned any more, so it ends.

Spark plans a batch by writing `offsets/<batch>`, and refuses where an entry of that name is there ("Multiple streaming
queries are concurrently using ..."). A fence is such an entry, for the first batch that is not planned. It is no entry
that Spark could read: nothing starts in a fenced directory, a successor goes on from a clone.

A name beside it, `offsets/fenced-at-<batch>`, lets readers know of the fence by the listing that they make anyway. It
is written first, and means nothing by itself: where the query was faster, the entry is its own, and the next batch is
fenced. Cut off anywhere, a fence leaves a directory that reads as before; it is put up again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Set
from dataclasses import dataclass

from dagster_ckpt.io.folder import Folder

_OFFSETS = "offsets"
_COMMITS = "commits"
_MARK = "fenced-at-"
_HEADER = b"dagster_ckpt fence 1\n"
_POLL_S = 0.25
# Between a query's look whether an entry is there and its writing of it.
_SETTLE_S = 0.2
_SETTLE_REMOTE_S = 2.0


@dataclass(frozen=True)
class Fence:
    """What a fence has done.

    Attributes:
        batch_id: The batch that can no longer be planned. Nothing after the one before it was, or will be.
        in_flight: The batch before it where it is planned and was not committed within the time; or None.
    """

    batch_id: int
    in_flight: int | None


def planned(folder: Folder) -> list[int]:
    """Batches with planned offsets, ascending; a fence is none."""
    names = folder.listing(_OFFSETS).names
    return [batch for batch in _numbers(names) if not _is_fenced(folder, batch, names)]


def fenced_at(folder: Folder) -> int | None:
    """The batch that a fence keeps from being planned, or None where there is no fence."""
    names = folder.listing(_OFFSETS).names
    return next((batch for batch in reversed(_numbers(names)) if _is_fenced(folder, batch, names)), None)


def fence(
    folder: Folder,
    *,
    by: str,
    wait_s: float,
    still_mine: Callable[[], None] = lambda: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Fence:
    """Keep a query from planning another batch, and wait for the one that it may be at.

    May be done again, and by several at once.

    Args:
        folder: Its live directory.
        by: Who fences, for people.
        wait_s: How long to wait for a batch in flight to be committed. One that is not may still write to its sink.
        still_mine: Called before each step; raises where the caller may do no more.
        sleep: Lets time pass.

    Raises:
        StorageAccessError: The directory cannot be read or written.
    """
    content = _HEADER + json.dumps({"by": by}).encode()
    while True:
        still_mine()
        batch = fenced_at(folder)
        if batch is None:
            batch = max(planned(folder), default=-1) + 1
            folder.write(f"{_OFFSETS}/{_MARK}{batch}", [content])
            still_mine()
            folder.create_if_absent(f"{_OFFSETS}/{batch}", content)
        # Where the query looked before and wrote after, its entry has taken the place of ours, or takes it now.
        sleep(_SETTLE_S if folder.width == 1 else _SETTLE_REMOTE_S)
        if fenced_at(folder) != batch:
            continue
        in_flight = _await_commit(folder, batch - 1, wait_s, still_mine, sleep)
        if fenced_at(folder) == batch:
            return Fence(batch, in_flight)


def _await_commit(
    folder: Folder, batch: int, wait_s: float, still_mine: Callable[[], None], sleep: Callable[[float], None]
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


def _is_fenced(folder: Folder, batch: int, names: Set[str]) -> bool:
    if f"{_MARK}{batch}" not in names:
        return False
    try:
        data = folder.read(f"{_OFFSETS}/{batch}", len(_HEADER))
    except FileNotFoundError:
        return False
    # Cut off while it was written it is a fence as well: Spark's own entries appear whole, and begin otherwise.
    return _HEADER.startswith(data)
