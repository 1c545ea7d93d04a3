"""What each event changes in the counts and last figures of its stream, in the transaction of the event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sqlalchemy import Connection, text

from dagster_ckpt.catalog.records import EventType, ExecutionStatus, StartCause
from dagster_ckpt.values import metrics
from dagster_ckpt.values.metrics import Change

# The same in SQLite and PostgreSQL.
_CHANGE = (
    "INSERT INTO metrics (stream_id, name, kind, value) VALUES (:stream_id, :name, :kind, :value) "
    "ON CONFLICT (stream_id, name, kind) DO UPDATE SET value = "
)
_ADD, _SET = text(f"{_CHANGE} metrics.value + excluded.value"), text(f"{_CHANGE} excluded.value")

_RESTARTS = {StartCause.RESTART_IN_PLACE.value: "in_place", StartCause.RESTART_NEW_RUN.value: "new_run"}
_OF_COMPLETED = {
    "incremental_bytes": (metrics.WRITTEN, metrics.LAST_NEW_SIZE),
    "full_bytes": (metrics.LAST_SIZE,),
    "duration_ms": (metrics.LAST_DURATION,),
    "alignment_ms": (metrics.LAST_ALIGNMENT,),
}


def changes_of(event: EventType, payload: Mapping[str, Any], at_ms: int) -> Iterator[Change]:
    """Counters are added to, gauges are set; times are in ms."""
    kind = str(payload.get("kind") or "").lower()
    match event:
        case EventType.CHECKPOINT_COMPLETED | EventType.SAVEPOINT_COMPLETED:
            yield metrics.COMPLETED, kind, 1
            yield metrics.LAST_TIME, kind, at_ms
            for name, changed in _OF_COMPLETED.items():
                # An unknown figure must not stay that of an earlier snapshot, but a counter may.
                yield from ((metric, kind, payload.get(name) or 0) for metric in changed)
        case EventType.CHECKPOINT_FAILED | EventType.SAVEPOINT_FAILED:
            yield metrics.FAILED, kind, 1
        case EventType.SNAPSHOT_DELETED:
            yield metrics.DELETED, "", 1
            yield metrics.FREED, "", payload.get("freed_bytes") or 0
        case EventType.EXECUTION_STARTED if payload.get("cause") in _RESTARTS:
            yield metrics.RESTARTS, _RESTARTS[payload["cause"]], 1
        case EventType.EXECUTION_RUNNING if payload.get("recovery_ms") is not None:
            yield metrics.RECOVERY_TIME, "", payload["recovery_ms"]
            yield metrics.LAST_RECOVERY, "", payload["recovery_ms"]
        case EventType.EXECUTION_ENDED if payload.get("status") == ExecutionStatus.FAILED.value:
            yield metrics.FAILURES, "", 1
        case EventType.TERMINALLY_FAILED:
            yield metrics.TERMINAL_FAILURES, "", 1
        case EventType.LEASE_TAKEN_OVER:
            yield metrics.LEASES_LOST, "ended" if payload.get("proven") else "unproven", 1
        case _:
            pass


def note_changes(connection: Connection, stream_id: str, changes: Iterable[Change]) -> None:
    added: list[dict[str, object]] = []
    replaced: list[dict[str, object]] = []
    for metric, kind, value in changes:
        row = {"stream_id": stream_id, "name": metric.name, "kind": kind, "value": value}
        (added if metric.is_counter else replaced).append(row)
    for statement, rows in ((_ADD, added), (_SET, replaced)):
        if rows:
            connection.execute(statement, rows)
