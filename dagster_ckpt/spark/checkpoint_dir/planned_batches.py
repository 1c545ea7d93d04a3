"""What Spark plans for a batch: read it, plan the same batch in another live directory, or prevent its planning.

A file source's offset only numbers an entry of its log, so these entries belong to the plan. So does the query id,
under which a sink may have the batch.

A *fence* is an entry that Spark cannot read, for the first unplanned batch: Spark never replaces an entry, so the query
ends ("Fencing" in docs/internals.md). The marker `offsets/fenced-at-<batch>` shows it in listings. Written first, it
means nothing without the entry: if the query was faster, the next batch is fenced.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

from dagster_ckpt.catalog.journal import PlannedBatch
from dagster_ckpt.errors import LiveDirectoryError, RestoreError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.spark.checkpoint_dir.file_source import COMPACT, entries_by_id, entry_id, log_offset
from dagster_ckpt.spark.checkpoint_dir.layout import (
    COMMITS,
    FENCE_HEADER,
    FENCE_MARK,
    METADATA,
    OFFSETS,
    SOURCES,
    LiveDirectory,
    batch_ids,
    fenced_at,
)
from dagster_ckpt.spark.checkpoint_dir.logs import (
    log_entry,
    parse_log_lines,
    parse_metadata,
    parse_offset_entry,
    plan_digest,
    read_offset_entry,
)
from dagster_ckpt.spark.checkpoint_dir.restore import give_query_id

# A larger `.compact` entry is not read: it would slow down the query's driver.
_LONGEST_LIST = 8 << 20


def read_planned(live: LiveDirectory, numbers: Iterable[int]) -> Iterator[PlannedBatch]:
    metadata: bytes | None = None
    for batch_id in numbers:
        # Spark purges the oldest entries.
        with suppress(FileNotFoundError):
            metadata = live.folder.read(METADATA) if metadata is None else metadata
            yield read_plan(live.folder, batch_id, metadata)


def planned_by(batch: PlannedBatch) -> str | None:
    data = batch.files.get(METADATA)
    return parse_metadata(data, f"The journal of batch {batch.batch_id}").id if data is not None else None


def read_plan_digest(live: LiveDirectory, batch_id: int) -> str:
    """Return a digest of a plan's times and offsets, which differs from any other plan's of this batch."""
    where = f"{live.url}/{OFFSETS}/{batch_id}"
    try:
        return plan_digest(live.folder.read(f"{OFFSETS}/{batch_id}"), where)
    except FileNotFoundError as error:
        raise LiveDirectoryError(
            f"{where} is missing, although Spark runs the batch. Start the stream again."
        ) from error


def plan_again(live: LiveDirectory, batch: PlannedBatch) -> None:
    """Plan a recorded batch in another live directory, in which no query may run."""
    folder = live.folder
    try:
        before = _digest(folder, batch.batch_id - 1)
    except FileNotFoundError:
        before = None
    if before != batch.follows:
        raise RestoreError(
            f"Batch {batch.batch_id} was planned after another batch {batch.batch_id - 1} than that in {live.url}."
        )
    query_id = planned_by(batch)
    if query_id is not None:
        # Only the id, because a rewrite concerns one directory.
        give_query_id(live, query_id)
    # The offset entry goes last: it makes the batch planned.
    for path in sorted({*batch.files} - {METADATA}, key=lambda path: path.startswith(f"{OFFSETS}/")):
        data = batch.files[path]
        if path.endswith(COMPACT):
            data = _with_earlier_files(folder, path, data)
        folder.write(path, [data])


def read_plan(folder: FileIO, batch_id: int, metadata: bytes | None = None) -> PlannedBatch:
    name, metadata = f"{OFFSETS}/{batch_id}", metadata or folder.read(METADATA)
    data = folder.read(name)
    entry = parse_offset_entry(data, f"{folder.url}/{name}")
    before = read_offset_entry(folder, batch_id - 1) if batch_id > 0 else None
    files = {METADATA: metadata, name: data}
    for source, offset in entry.sources.items():
        last = log_offset(offset)
        if last is not None:
            first = log_offset(before.sources.get(source)) if before is not None else None
            for position in range(-1 if first is None else first, last):
                path, listed = _listed(folder, f"{SOURCES}/{source}", position + 1)
                files[path] = listed
    return PlannedBatch(batch_id, _digest(folder, batch_id - 1), files)


def _listed(folder: FileIO, directory: str, position: int) -> tuple[str, bytes]:
    path = f"{directory}/{position}"
    try:
        return path, folder.read(path)
    except FileNotFoundError:
        path += COMPACT
    data = folder.read(path, _LONGEST_LIST)
    if len(data) >= _LONGEST_LIST:
        raise FileNotFoundError(path)
    own = [line for line in parse_log_lines(data, f"{folder.url}/{path}") if line.get("batchId") == position]
    return path, log_entry(own)


def _with_earlier_files(folder: FileIO, path: str, data: bytes) -> bytes:
    directory, _, name = path.rpartition("/")
    position = entry_id(name) or 0
    found = entries_by_id(folder.listing(directory).names)
    entries = {number: each for number, each in found.items() if number < position}
    base = max((number for number, each in entries.items() if each.endswith(COMPACT)), default=-1)
    lines = [
        line
        for number in sorted(entries)
        if number >= base
        for line in parse_log_lines(folder.read(f"{directory}/{entries[number]}"), f"{directory}/{entries[number]}")
    ]
    return log_entry([*lines, *parse_log_lines(data, path)])


def _digest(folder: FileIO, batch_id: int) -> str:
    return hashlib.sha256(folder.read(f"{OFFSETS}/{batch_id}")).hexdigest() if batch_id >= 0 else ""


_POLL_S = 0.25
# Longest time between a query's check for an entry and its write.
_SETTLE_S = 0.2
_SETTLE_REMOTE_S = 2.0


@dataclass(frozen=True)
class Fence:
    """The result of fencing.

    Attributes:
        batch_id: No batch from this one on was or will be planned.
        in_flight: The batch before it, if it was not committed in time.
    """

    batch_id: int
    in_flight: int | None


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
        wait_s: Longest wait for the batch in flight, which may still write to its sink.
        still_mine: Called before each step; raises if the caller may not continue.
        step: Entered around the writes, if a successor could run a query there.
    """
    content = FENCE_HEADER + json.dumps({"by": by}).encode()
    while True:
        still_mine()
        batch = fenced_at(folder)
        if batch is None:
            batch = max(batch_ids(folder, OFFSETS), default=-1) + 1
            with step():
                folder.write(f"{OFFSETS}/{FENCE_MARK}{batch}", [content])
            still_mine()
            with step():
                folder.create_if_absent(f"{OFFSETS}/{batch}", content)
        # A query that checked before has replaced the fence by now.
        sleep(_SETTLE_S if folder.width == 1 else _SETTLE_REMOTE_S)
        if fenced_at(folder) != batch:
            continue
        in_flight = _await_commit(folder, batch - 1, wait_s, still_mine, sleep)
        if fenced_at(folder) == batch:
            return Fence(batch, in_flight)


def lift_fence(folder: FileIO, batch_id: int) -> None:
    if fenced_at(folder) == batch_id:
        folder.delete(f"{OFFSETS}/{batch_id}")
        folder.delete(f"{OFFSETS}/{FENCE_MARK}{batch_id}")


def open_fence(folder: FileIO, batch_id: int, planned_entry: bytes) -> None:
    """Replace a fence by the plan of its batch, so that a query can start there.

    The fenced query never plans this batch: an entry of that name exists throughout.
    """
    folder.write(f"{OFFSETS}/{batch_id}", [planned_entry])
    folder.delete(f"{OFFSETS}/{FENCE_MARK}{batch_id}")


def _await_commit(
    folder: FileIO, batch: int, wait_s: float, still_mine: Callable[[], None], sleep: Callable[[float], None]
) -> int | None:
    waited_s = 0.0
    while batch >= 0:
        if batch in batch_ids(folder, COMMITS):
            break
        if waited_s >= wait_s:
            return batch
        still_mine()
        sleep(_POLL_S)
        waited_s += _POLL_S
    return None
