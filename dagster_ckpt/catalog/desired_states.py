"""Desired states of managed streams, and the progress of their upgrades."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Row, select

from dagster_ckpt.catalog.database import Records, as_text, cells, lock_snapshot, read_dict
from dagster_ckpt.catalog.records import EventType, LeaseRecord, SnapshotStatus
from dagster_ckpt.catalog.tables import desired_states
from dagster_ckpt.policies.upgrade import UpgradeMode
from dagster_ckpt.values.modes import DesiredState
from dagster_ckpt.values.redaction import without_secrets


class UpgradePhase(StrEnum):
    """Phase of an upgrade; `dagster_ckpt.client.desired_state` has the transitions."""

    PREFLIGHT = "PREFLIGHT"
    HANDING_OVER = "HANDING_OVER"
    STOPPING = "STOPPING"
    STARTING = "STARTING"
    UPGRADING = "UPGRADING"
    ROLLING_BACK = "ROLLING_BACK"
    RESTORING = "RESTORING"
    STABLE = "STABLE"
    REFUSED = "REFUSED"
    ROLLED_BACK = "ROLLED_BACK"
    ROLLBACK_FAILED = "ROLLBACK_FAILED"

    @property
    def is_over(self) -> bool:
        return self in _OVER

    @property
    def refuses(self) -> bool:
        return self.is_over and self is not UpgradePhase.STABLE

    @property
    def can_be_undone(self) -> bool:
        return self in (UpgradePhase.UPGRADING, UpgradePhase.STABLE)

    @property
    def goes_back(self) -> bool:
        """Whether a rollback is in progress, which finishes regardless of the desired state."""
        return self in (UpgradePhase.ROLLING_BACK, UpgradePhase.RESTORING)


_OVER = (UpgradePhase.STABLE, UpgradePhase.REFUSED, UpgradePhase.ROLLED_BACK, UpgradePhase.ROLLBACK_FAILED)


@dataclass(frozen=True)
class UpgradeRecord:
    """The progress of an upgrade.

    Attributes:
        old_execution_id: The newest execution before the new code.
        started_at_ms: When the first execution of the new code began.
        snapshot_id: The snapshot that a rollback restores.
        failing_before: Health checks that already failed when it began.
    """

    phase: UpgradePhase
    from_version: str | None
    to_version: str | None
    mode: UpgradeMode
    began_at_ms: int
    reason: str
    old_execution_id: str | None = None
    starts: int = 0
    started_at_ms: int | None = None
    snapshot_id: str | None = None
    failing_before: Sequence[str] = ()


@dataclass(frozen=True)
class PreflightRecord:
    """Result of running new code on a copy of the state; `refused_plan` is the fingerprint of a plan to accept."""

    code_version: str | None
    passed: bool
    reason: str
    batch_id: int | None
    at_ms: int
    refused_plan: str | None = None


class AlertUntil(StrEnum):
    """What ends an alert.

    STOPPED: The stream is no longer running.
    DEFINED: A code location defines the stream again, or it was retired.
    """

    STOPPED = "STOPPED"
    DEFINED = "DEFINED"


@dataclass(frozen=True)
class DesiredRecord:
    """A managed stream; a `broken` one is not reconciled.

    Attributes:
        desired: None: the asset's definition decides.
        generation: Increases with each change of the desired state and with each upgrade.
        reached: The last reconciled generation.
    """

    stream_id: str
    desired: DesiredState | None
    generation: int
    reached: int
    request_id: str | None
    upgrade: UpgradeRecord | None
    preflight: PreflightRecord | None
    alert: str | None
    origin: str
    changed_at_ms: int
    updated_at_ms: int
    broken: str | None = None
    alert_until: AlertUntil | None = None


class DesiredStateRecords(Records):
    """Desired states, which users set, and the progress that the sensor records.

    The sensor's write counts only for the generation that it was computed for, so it never overrides a user's change.
    """

    def find(self, stream_id: str) -> DesiredRecord | None:
        with self._database.reading() as connection:
            return _find(connection, stream_id)

    def all(self) -> dict[str, DesiredRecord]:
        rows = self._database.rows(select(desired_states).order_by(desired_states.c.stream_id))
        return {row.stream_id: _record(row) for row in rows}

    def of(self, stream_ids: Sequence[str]) -> dict[str, DesiredRecord]:
        rows = self._database.rows(select(desired_states).where(desired_states.c.stream_id.in_(stream_ids)))
        return {row.stream_id: _record(row) for row in rows}

    def ensure(self, stream_id: str, *, origin: str) -> DesiredRecord:
        with self._database.writing() as connection:
            return self._ensure(connection, stream_id, origin)

    def put(
        self,
        stream_id: str,
        desired: DesiredState | None,
        *,
        origin: str,
        retry_refused: bool = False,
        seen: DesiredRecord | None = None,
    ) -> DesiredRecord:
        """Set the desired state; None lets the asset's definition decide.

        Args:
            retry_refused: Allow a code version again that was refused or rolled back.
            seen: Do nothing if the desired state has changed since then.
        """
        with self._database.writing() as connection:
            before = self._ensure(connection, stream_id, origin)
            if seen is not None:
                _lock(connection, stream_id)
                before = _get(connection, stream_id)
                if before.generation != seen.generation:
                    return before
            values: dict[str, Any] = {
                "desired": desired.value if desired is not None else None,
                "generation": desired_states.c.generation + 1,
                "alert": None,
                "alert_until": None,
                "origin": origin,
                "changed_at_ms": self._database.now_ms(connection),
            }
            if retry_refused and before.upgrade is not None and before.upgrade.phase.refuses:
                values["upgrade"] = None
            _change(connection, stream_id, values["changed_at_ms"], values)
            payload = {"desired": values["desired"], "origin": origin}
            self._database.record_event(connection, stream_id, EventType.DESIRED_STATE_SET, payload=payload)
            return _get(connection, stream_id)

    def advance(
        self,
        before: DesiredRecord,
        *,
        upgrade: UpgradeRecord | None,
        alert: str | None,
        request_id: str | None,
        alert_until: AlertUntil | None = None,
        reached: bool = False,
        begins: bool = False,
        lease: LeaseRecord | None = None,
    ) -> bool:
        """Record progress, with an event for each change.

        False, with nothing recorded, if the desired state changed concurrently or the rollback's snapshot is being
        deleted.

        Args:
            begins: An upgrade begins.
        """
        with self._database.writing_as(lease) as connection:
            _lock(connection, before.stream_id)
            row = _find(connection, before.stream_id)
            if row is None or row.generation != before.generation:
                return False
            if upgrade is not None and _newly_names_a_deleted_snapshot(connection, upgrade, row.upgrade):
                return False
            values = {
                "upgrade": as_text(_to_keep(upgrade)) if upgrade is not None else None,
                "alert": alert,
                "alert_until": alert_until,
                "request_id": request_id,
                "generation": row.generation + int(begins),
                "reached": row.generation if reached else row.reached,
            }
            _change(connection, row.stream_id, self._database.now_ms(connection), values)
            if upgrade is not None and upgrade != row.upgrade:
                payload = {"phase": upgrade.phase.value, "to_version": upgrade.to_version, "reason": upgrade.reason}
                self._database.record_event(connection, row.stream_id, EventType.UPGRADE_CHANGED, payload=payload)
            if alert is not None and alert != row.alert:
                self._database.record_event(connection, row.stream_id, EventType.ALERT, payload={"alert": alert})
            return True

    def note_preflight(self, stream_id: str, preflight: PreflightRecord) -> None:
        with self._database.writing() as connection:
            self._ensure(connection, stream_id, "preflight")
            now_ms = self._database.now_ms(connection)
            kept = _to_keep(preflight)
            _change(connection, stream_id, now_ms, {"preflight": as_text(kept)})
            payload = {"to_version": kept["code_version"], "passed": kept["passed"], "reason": kept["reason"]}
            self._database.record_event(connection, stream_id, EventType.CODE_TRIED, payload=payload)

    def _ensure(self, connection: Connection, stream_id: str, origin: str) -> DesiredRecord:
        now_ms = self._database.now_ms(connection)
        new = {"generation": 1, "reached": 0, "origin": origin, "changed_at_ms": now_ms, "updated_at_ms": now_ms}
        self._database.insert_if_absent(connection, desired_states, stream_id=stream_id, **new)
        _lock(connection, stream_id)
        return _get(connection, stream_id)


def _to_keep(record: UpgradeRecord | PreflightRecord) -> dict[str, Any]:
    return asdict(replace(record, reason=without_secrets(record.reason)))


def _of(stream_id: str) -> Any:
    return desired_states.c.stream_id == stream_id


def _newly_names_a_deleted_snapshot(
    connection: Connection, upgrade: UpgradeRecord, before: UpgradeRecord | None
) -> bool:
    is_new = before is None or before.phase.is_over or before.snapshot_id != upgrade.snapshot_id
    if upgrade.snapshot_id is None or upgrade.phase.is_over or not is_new:
        return False
    row = lock_snapshot(connection, upgrade.snapshot_id)
    return row is not None and row.status in (SnapshotStatus.DELETING.value, SnapshotStatus.DELETED.value)


def _lock(connection: Connection, stream_id: str) -> None:
    connection.execute(select(desired_states.c.stream_id).where(_of(stream_id)).with_for_update())


def _change(connection: Connection, stream_id: str, now_ms: int, values: dict[str, Any]) -> None:
    connection.execute(desired_states.update().where(_of(stream_id)).values(**values, updated_at_ms=now_ms))


def _find(connection: Connection, stream_id: str) -> DesiredRecord | None:
    row = connection.execute(select(desired_states).where(_of(stream_id))).one_or_none()
    return _record(row) if row is not None else None


def _get(connection: Connection, stream_id: str) -> DesiredRecord:
    return _record(connection.execute(select(desired_states).where(_of(stream_id))).one())


def _record(row: Row[Any]) -> DesiredRecord:
    troubles: list[str] = []
    values = cells(row, desired_states, troubles)
    upgrade = read_dict(values["upgrade"], "upgrade", troubles)
    preflight = read_dict(values["preflight"], "preflight", troubles)
    try:
        values["desired"] = DesiredState(values["desired"]) if values["desired"] is not None else None
        values["alert_until"] = AlertUntil(values["alert_until"]) if values["alert_until"] is not None else None
        values["upgrade"] = _upgrade(upgrade) if upgrade is not None else None
        values["preflight"] = PreflightRecord(**preflight) if preflight is not None else None
    except (KeyError, TypeError, ValueError) as error:
        troubles.append(f"its upgrade cannot be parsed: {error}")
        values |= {"desired": None, "upgrade": None, "preflight": None, "alert_until": None}
    return DesiredRecord(**values, broken="; ".join(troubles) or None)


def _upgrade(stored: dict[str, Any]) -> UpgradeRecord:
    phase, failing = UpgradePhase(stored["phase"]), tuple(stored.get("failing_before", ()))
    return UpgradeRecord(**{**stored, "phase": phase, "mode": UpgradeMode(stored["mode"]), "failing_before": failing})
