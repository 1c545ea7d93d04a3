"""Savepoint sets in storage: beside each savepoint a file that names the savepoints of its set, for a rebuilt catalog.

A set is written there before the catalog records it, and deleted there before the catalog releases it. So storage has
each set of the catalog, and one of these files is enough to register it as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus
from dagster_ckpt.catalog.savepoint_sets import SAVEPOINT_SET, SavepointSet, set_from, values_of
from dagster_ckpt.errors import CkptError, SnapshotCorruptError
from dagster_ckpt.snapshot.object_store import ObjectSnapshotStore
from dagster_ckpt.values.modes import SnapshotKind
from dagster_ckpt.values.untrusted import from_json, reading

if TYPE_CHECKING:
    from dagster_ckpt.stream.handle import StreamHandle

_MEMBERS = "savepoints"


def write_set(made: SavepointSet, open_stream: Callable[[str], StreamHandle]) -> None:
    """Repeatable. A storage class of the user's own keeps no sets."""
    members = {stream: each.snapshot_id for stream, each in made.savepoints.items()}
    _put(made, open_stream, json.dumps({**values_of(made), _MEMBERS: members}).encode())


def delete_set(made: SavepointSet, open_stream: Callable[[str], StreamHandle]) -> None:
    """Repeatable; the savepoints stay."""
    _put(made, open_stream, None)


def _put(made: SavepointSet, open_stream: Callable[[str], StreamHandle], content: bytes | None) -> None:
    for stream, each in made.savepoints.items():
        store = open_stream(stream).store
        if isinstance(store, ObjectSnapshotStore) and each.location is not None:
            store.put_set(each.location, content)


def register_sets(stream: StreamHandle, found: Iterable[SnapshotRecord]) -> tuple[list[str], list[str]]:
    """Only sets of which the catalog has every savepoint.

    Returns their names, and why others are not registered.
    """
    registered: list[str] = []
    incomplete: list[str] = []
    for snapshot in found:
        try:
            stored = _set_beside(stream, snapshot)
            if stored is None:
                continue
            made, members = stored
            listed = stream.catalog.snapshots.by_id(list(members.values()))
            lacking = [each for each in made.streams if not _is_there(listed.get(members.get(each, "")), each)]
            name = f"savepoint set {made.label or made.set_id}"
            if lacking:
                incomplete.append(f"{name} is not registered: the catalog lacks its savepoint of {', '.join(lacking)}")
            elif not all(SAVEPOINT_SET in each.properties for each in listed.values()):
                stream.catalog.savepoint_sets.record(made, list(listed))
                registered.append(name)
        except CkptError as error:
            incomplete.append(f"the savepoint set beside {snapshot.location} is not registered: {error}")
    return registered, incomplete


def _set_beside(stream: StreamHandle, snapshot: SnapshotRecord) -> tuple[SavepointSet, dict[str, str]] | None:
    store = stream.store
    if not isinstance(store, ObjectSnapshotStore) or snapshot.kind is not SnapshotKind.SAVEPOINT:
        return None
    content = store.set_of(snapshot.location or "")
    if content is None:
        return None
    with reading(lambda why: SnapshotCorruptError(f"The record of its set cannot be read: {why}")):
        values = from_json(content)
        return set_from(values), {str(each): str(its) for each, its in values[_MEMBERS].items()}


def _is_there(snapshot: SnapshotRecord | None, stream_id: str) -> bool:
    return snapshot is not None and snapshot.stream_id == stream_id and snapshot.status is SnapshotStatus.COMPLETED
