"""Savepoint sets, recorded with their savepoints in one transaction: a set exists as a whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Row, select

from dagster_ckpt.catalog.database import Records, as_text, lock_snapshot, optional_dict
from dagster_ckpt.catalog.history import read_snapshot
from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus
from dagster_ckpt.catalog.tables import snapshots
from dagster_ckpt.errors import SnapshotNotFoundError

SAVEPOINT_SET = "savepoint_set"


@dataclass(frozen=True)
class SavepointSet:
    """Savepoints of streams that read each other, none of which has read rows that another one lacks.

    Attributes:
        streams: Their ids, upstream first.
        unproven: Why the set is not proven to be consistent, if that was accepted.
        is_counted: Later sets of this selection replace it (`keep`).
        created_at_ms: Later than that of every earlier set, even if the clock was set back.
    """

    set_id: str
    selection: str
    streams: tuple[str, ...]
    origin: str
    label: str | None = None
    unproven: tuple[str, ...] = ()
    is_counted: bool = False
    created_at_ms: int = 0
    executions: tuple[str, ...] = ()
    savepoints: Mapping[str, SnapshotRecord] = field(default_factory=dict)

    def messages(self) -> list[str]:
        name = f"savepoint set {self.set_id}" + (f" ({self.label})" if self.label else "")
        lines = [f"  {stream}: {self._place(stream)}" for stream in self.streams]
        return [name, *lines, *(f"  not provable: {why}" for why in self.unproven)]

    def _place(self, stream: str) -> str:
        found = self.savepoints.get(stream)
        return f"batch {found.batch_id}, {found.location}" if found is not None else "its savepoint is gone"


class SavepointSetRecords(Records):
    def record(self, made: SavepointSet, snapshot_ids: Sequence[str]) -> SavepointSet:
        """Record a set, whose savepoints no stream owns any more.

        Raises:
            SnapshotNotFoundError: One of them is gone.
        """
        with self._database.writing() as connection:
            values = values_of(made)
            for snapshot_id in snapshot_ids:
                row = lock_snapshot(connection, snapshot_id)
                if row is None or row.status != SnapshotStatus.COMPLETED.value:
                    raise SnapshotNotFoundError(
                        f"Savepoint {snapshot_id} was deleted before set {made.set_id} was complete. Take another set."
                    )
                self._put(connection, row, values)
        return self.get(made.set_id)

    def all(self) -> list[SavepointSet]:
        holding = snapshots.c.properties.contains(f'"{SAVEPOINT_SET}":{{', autoescape=True)
        found: dict[str, SavepointSet] = {}
        for row in self._database.rows(select(snapshots).where(holding)):
            values = set_in(row)
            if values is not None and row.status == SnapshotStatus.COMPLETED.value:
                known = found.setdefault(str(values["id"]), set_from(values))
                snapshot = read_snapshot(row)
                found[known.set_id] = replace(known, savepoints={**known.savepoints, snapshot.stream_id: snapshot})
        return sorted(found.values(), key=lambda each: each.created_at_ms, reverse=True)

    def get(self, reference: str) -> SavepointSet:
        sets = self.all()
        named = [each for each in sets if reference in (each.set_id, each.label)]
        if not named:
            raise SnapshotNotFoundError(
                f"The catalog has no savepoint set {reference!r}. It has: "
                f"{', '.join(each.label or each.set_id for each in sets) or 'none'}."
            )
        return named[0]

    def release(self, set_id: str) -> None:
        """Dissolve a set: its streams own the savepoints, and delete them like checkpoints."""
        with self._database.writing() as connection:
            for snapshot in self.get(set_id).savepoints.values():
                row = lock_snapshot(connection, snapshot.snapshot_id)
                if row is not None:
                    self._put(connection, row, None)

    @staticmethod
    def _put(connection: Any, row: Row[Any], values: Mapping[str, Any] | None) -> None:
        properties = {**(optional_dict(row.properties) or {}), SAVEPOINT_SET: values}
        if values is None:
            del properties[SAVEPOINT_SET]
        this = snapshots.c.snapshot_id == row.snapshot_id
        connection.execute(
            snapshots.update().where(this).values(properties=as_text(properties), claimed=values is None)
        )


def set_in(row: Row[Any]) -> dict[str, Any] | None:
    if f'"{SAVEPOINT_SET}":' not in row.properties:
        return None
    found = (optional_dict(row.properties) or {}).get(SAVEPOINT_SET)
    return found if isinstance(found, dict) and "id" in found else None


def values_of(made: SavepointSet) -> dict[str, Any]:
    return {
        "id": made.set_id,
        "selection": made.selection,
        "streams": list(made.streams),
        "origin": made.origin,
        "label": made.label,
        "unproven": list(made.unproven),
        "is_counted": made.is_counted,
        "created_at_ms": made.created_at_ms,
        "executions": list(made.executions),
    }


def set_from(values: Mapping[str, Any]) -> SavepointSet:
    created = values.get("created_at_ms")
    return SavepointSet(
        set_id=str(values["id"]),
        selection=str(values.get("selection")),
        streams=tuple(map(str, values.get("streams") or ())),
        origin=str(values.get("origin")),
        label=str(values["label"]) if values.get("label") else None,
        unproven=tuple(map(str, values.get("unproven") or ())),
        is_counted=values.get("is_counted") is True,
        created_at_ms=created if isinstance(created, int) else 0,
        executions=tuple(map(str, values.get("executions") or ())),
    )
