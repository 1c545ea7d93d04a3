"""A savepoint that is made from another snapshot instead of from the live directory: promoted or edited."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dagster_ckpt.catalog.records import CompletedSnapshot, SnapshotRecord, SnapshotTrigger
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.snapshot.store import StoredSnapshot
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import holding
from dagster_ckpt.values.durations import wall_clock_ms
from dagster_ckpt.values.modes import SnapshotKind

# Properties that belong to the original only.
_OF_THE_ORIGINAL = frozenset({"label", "schedule"})


class SavepointIdentity:
    """The identity of a derived savepoint, from which its header is made.

    Attributes:
        snapshot_id: Its id.
        number: Its number.
        trigger: Why it is taken.
        label: A name to start from later, or None.
    """

    def __init__(self, number: int, trigger: SnapshotTrigger, label: str | None) -> None:
        self.snapshot_id = str(uuid.uuid4())
        self.number, self.trigger, self.label = number, trigger, label

    def header(self, original: SnapshotHeader, **changed: Any) -> SnapshotHeader:
        """The header of the original, with this identity.

        Args:
            original: The original's header.
            changed: Further fields; `properties` are added to those of the original.
        """
        inherited = {name: value for name, value in original.properties.items() if name not in _OF_THE_ORIGINAL}
        properties = {**inherited, "trigger": self.trigger.value, **changed.pop("properties", {})}
        properties |= {"label": self.label} if self.label is not None else {}
        return original.model_copy(
            update={
                "snapshot_id": self.snapshot_id,
                "number": self.number,
                "kind": SnapshotKind.SAVEPOINT,
                "properties": properties,
                **changed,
            }
        )


def derive_savepoint(
    stream: StreamHandle,
    original: SnapshotRecord,
    write: Callable[[SavepointIdentity], tuple[StoredSnapshot, SnapshotHeader]],
    *,
    trigger: SnapshotTrigger,
    label: str | None,
    purpose: str,
    state_rows: int | None,
    began_ms: int,
) -> SnapshotRecord:
    """Write and record a savepoint that is made from another snapshot. The stream may be running.

    Args:
        stream: The stream.
        original: The snapshot it is made from; it is held until the savepoint is complete.
        write: Writes the savepoint.
        trigger: Why it is taken.
        label: A name to start from later, or None.
        purpose: Why the original is held, for people.
        state_rows: Number of rows in its state, or None if unknown.
        began_ms: When the work began.

    Raises:
        CatalogError: The catalog cannot record it.
        StorageAccessError: It cannot be written; the catalog lists the attempt as failed.
    """
    snapshots = stream.catalog.snapshots
    identity = SavepointIdentity(stream.catalog.streams.allocate_number(stream.stream_id), trigger, label)
    with failing_unless_recorded(stream, identity.snapshot_id) as written:
        begun = snapshots.start_of_stopped(
            stream.stream_id,
            snapshot_id=identity.snapshot_id,
            number=identity.number,
            trigger=trigger,
            timeline=original.timeline,
            label=label,
        )
        with holding(stream.catalog, [original, begun], f"{purpose} {identity.snapshot_id}"):
            stored, header = write(identity)
        written.append(stored.location)
        return snapshots.complete_of_stopped(
            identity.snapshot_id, _facts(stored, header, original, state_rows, wall_clock_ms() - began_ms)
        )


@contextmanager
def failing_unless_recorded(stream: StreamHandle, snapshot_id: str) -> Iterator[list[str]]:
    """Settle a savepoint without a lease if it is interrupted at any step before the catalog lists it.

    Args:
        stream: The stream.
        snapshot_id: The savepoint.

    Yields:
        A list that receives the location of the savepoint once all of it is there. Its bytes are deleted
        if the catalog confirms that it does not list them.
    """
    written: list[str] = []
    try:
        yield written
    except BaseException as error:
        stream.catalog.snapshots.fail_of_stopped(snapshot_id, str(error) or type(error).__name__)
        for location in written:
            if not any(each.location == location for each in stream.catalog.snapshots.completed(stream.stream_id)):
                stream.store.discard(location)
        raise


def _facts(
    stored: StoredSnapshot, header: SnapshotHeader, original: SnapshotRecord, state_rows: int | None, duration_ms: int
) -> CompletedSnapshot:
    return CompletedSnapshot(
        stored.location,
        batch_id=header.batch_id,
        query_id=header.query_id,
        full_bytes=stored.full_bytes,
        incremental_bytes=stored.incremental_bytes,
        file_count=stored.file_count,
        state_rows=state_rows,
        watermark=original.watermark,
        duration_ms=duration_ms,
        properties=dict(header.properties),
    )
