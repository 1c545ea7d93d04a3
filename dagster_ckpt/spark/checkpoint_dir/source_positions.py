"""Gives the offsets and logs of a live directory that no query uses to other sources, by Spark's numbers or names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from dagster_ckpt.errors import RestoreError
from dagster_ckpt.spark.checkpoint_dir.file_source import SourceFile, log_offset
from dagster_ckpt.spark.checkpoint_dir.layout import OFFSETS, SOURCES, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry, with_sources

_CHUNK = 1 << 20
# Spark's names for temporary files begin with a dot, and no source can be called so.
_OLD = ".former"


@dataclass(frozen=True)
class Position:
    """Its offset as JSON text, None before its first data, and files of its log by name."""

    offset: str | None = None
    log: Mapping[str, bytes] = field(default_factory=dict)


BEGINNING = Position()


def after_files(files: Iterable[SourceFile]) -> Position:
    """The position of a file source that takes these files for read."""
    lines = [
        json.dumps({"path": each.path, "timestamp": each.modified_at_ms or 0, "batchId": 0}, separators=(",", ":"))
        for each in files
    ]
    if not lines:
        return BEGINNING
    return Position('{"logOffset":0}', {"0": "\n".join(["v1", *lines]).encode()})


def give_positions(live: LiveDirectory, continued: Mapping[str, str], new: Mapping[str, Position]) -> None:
    """Let the next batch read other sources, in the order of `continued` and `new` together, by number or name.

    The batch in flight was planned for the former sources: its rows are read again by those that continue.

    Args:
        continued: A source to the former source whose offset and log it takes.
        new: A source to where it begins.
    """
    folder, batch_id = live.folder, live.positions().commit
    if batch_id is None:
        raise RestoreError(f"{live.url} has no committed batch, so its sources have no position to give to others.")
    folder.delete(f"{OFFSETS}/{batch_id + 1}")
    folder.flush(OFFSETS)
    order = in_order([*continued, *new])
    for number in (batch_id - 1, batch_id):
        path = f"{OFFSETS}/{number}"
        if folder.size(path) is None:
            continue
        data = folder.read(path)
        before = parse_offset_entry(data, f"{live.url}/{path}").sources
        offsets: dict[str, str | None] = {}
        for source in order:
            offset = before.get(continued[source]) if source in continued else new[source].offset
            # Spark asks a file source again for what lies between these two batches.
            is_before_its_log = source in new and number < batch_id and log_offset(offset) is not None
            offsets[source] = None if is_before_its_log else offset
        folder.write(path, [with_sources(data, f"{live.url}/{path}", offsets)])
    _move_logs(live, continued, new)


def in_order(sources: Iterable[str]) -> list[str]:
    found = list(sources)
    return sorted(found, key=int) if all(each.isdecimal() for each in found) else found


def _move_logs(live: LiveDirectory, continued: Mapping[str, str], new: Mapping[str, Position]) -> None:
    folder = live.folder
    there = [name for name, entry in folder.list(SOURCES).items() if entry.is_directory]
    former = {old: source for source, old in continued.items()}
    moved = [name for name in there if former.get(name) != name]
    # Two sources may have changed places.
    for name in moved:
        if name in former:
            _copy(live, f"{SOURCES}/{name}", f"{SOURCES}/{_OLD}-{name}")
        live.sibling(f"/{SOURCES}/{name}").folder.delete_all()
    for name in moved:
        if name in former:
            _copy(live, f"{SOURCES}/{_OLD}-{name}", f"{SOURCES}/{former[name]}")
            live.sibling(f"/{SOURCES}/{_OLD}-{name}").folder.delete_all()
    for source, position in new.items():
        for name, data in position.log.items():
            folder.place(f"{SOURCES}/{source}/{name}", [data])
    folder.flush_all()


def _copy(live: LiveDirectory, source: str, target: str) -> None:
    folder = live.folder
    for path, _entry in list(folder.find(source)):
        folder.place(f"{target}/{path.removeprefix(f'{source}/')}", _chunks(live, path))


def _chunks(live: LiveDirectory, path: str) -> Iterator[bytes]:
    with live.folder.open(path) as stream:
        yield from iter(lambda: stream.read(_CHUNK), b"")
