"""Read what Spark planned for a batch, and plan the same batch in another live directory.

A file source's offset only numbers an entry of its log, so these entries belong to the plan. So does the query id,
under which a sink may have the batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress

from dagster_ckpt.catalog.journal import PlannedBatch
from dagster_ckpt.errors import LiveDirectoryError, RestoreError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.spark.checkpoint_dir.file_source import COMPACT, entry_id, log_offset
from dagster_ckpt.spark.checkpoint_dir.layout import METADATA, OFFSETS, SOURCES, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import (
    OffsetEntry,
    parse_log_lines,
    parse_offset_entry,
    parse_query_id,
    plan_digest,
)
from dagster_ckpt.spark.checkpoint_dir.restore import give_query_id

# A larger `.compact` entry is not read: it would slow down the query's driver.
_LONGEST_LIST = 8 << 20


def read_planned(live: LiveDirectory, batch_ids: Iterable[int]) -> Iterator[PlannedBatch]:
    """Ascending, without incomplete ones."""
    metadata: bytes | None = None
    for batch_id in batch_ids:
        # Spark purges the oldest entries.
        with suppress(FileNotFoundError):
            metadata = live.folder.read(METADATA) if metadata is None else metadata
            yield read_plan(live.folder, batch_id, metadata)


def planned_by(batch: PlannedBatch) -> str | None:
    data = batch.files.get(METADATA)
    return parse_query_id(data, f"The journal of batch {batch.batch_id}") if data is not None else None


def read_plan_digest(live: LiveDirectory, batch_id: int) -> str:
    """Of its times and offsets, not its settings: tells it from any other batch of its number."""
    where = f"{live.url}/{OFFSETS}/{batch_id}"
    try:
        return plan_digest(live.folder.read(f"{OFFSETS}/{batch_id}"), where)
    except FileNotFoundError as error:
        raise LiveDirectoryError(
            f"{where} is missing, although Spark runs the batch. Start the stream again."
        ) from error


def plan_again(live: LiveDirectory, batch: PlannedBatch) -> None:
    """No query may run in the live directory."""
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
        # Only the id: a rewrite concerns one directory.
        give_query_id(live, query_id)
    # It makes the batch planned.
    for path in sorted({*batch.files} - {METADATA}, key=lambda path: path.startswith(f"{OFFSETS}/")):
        data = batch.files[path]
        if path.endswith(COMPACT):
            data = _with_earlier_files(folder, path, data)
        folder.write(path, [data])


def read_plan(folder: FileIO, batch_id: int, metadata: bytes | None = None) -> PlannedBatch:
    """FileNotFoundError if a part of it is missing."""
    name, metadata = f"{OFFSETS}/{batch_id}", metadata or folder.read(METADATA)
    data = folder.read(name)
    entry = parse_offset_entry(data, f"{folder.url}/{name}")
    before: OffsetEntry | None = None
    if batch_id > 0:
        earlier = f"{OFFSETS}/{batch_id - 1}"
        before = parse_offset_entry(folder.read(earlier), f"{folder.url}/{earlier}")
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
    return path, _entry(data, own)


def _with_earlier_files(folder: FileIO, path: str, data: bytes) -> bytes:
    """It also lists the files of all earlier entries."""
    directory, _, name = path.rpartition("/")
    position = entry_id(name) or 0
    entries: dict[int, str] = {}
    for each in folder.listing(directory).names:
        number = entry_id(each)
        if number is not None and number < position and (each.endswith(COMPACT) or number not in entries):
            entries[number] = each
    base = max((number for number, each in entries.items() if each.endswith(COMPACT)), default=-1)
    lines = [
        line
        for number in sorted(entries)
        if number >= base
        for line in parse_log_lines(folder.read(f"{directory}/{entries[number]}"), f"{directory}/{entries[number]}")
    ]
    return _entry(data, [*lines, *parse_log_lines(data, path)])


def _entry(like: bytes, lines: Iterable[object]) -> bytes:
    version = like.partition(b"\n")[0].decode()
    return "\n".join([version, *(json.dumps(line, separators=(",", ":")) for line in lines)]).encode()


def _digest(folder: FileIO, batch_id: int) -> str:
    return hashlib.sha256(folder.read(f"{OFFSETS}/{batch_id}")).hexdigest() if batch_id >= 0 else ""
