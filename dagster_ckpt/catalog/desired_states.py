"""The desired state of managed streams, and the progress of their upgrades."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Row, select

from dagster_ckpt.catalog.database import Database, as_text, cells, read_dict
from dagster_ckpt.catalog.records import EventType, LeaseRecord
from dagster_ckpt.catalog.tables import desired_states
from dagster_ckpt.config.modes import DesiredState
from dagster_ckpt.config.redaction import without_secrets
from dagster_ckpt.policies.upgrade import UpgradeMode


class UpgradePhase(StrEnum):
    """Where an upgrade is.

    PREFLIGHT → STOPPING → STARTING → UPGRADING → STABLE, or from UPGRADING → ROLLING_BACK → RESTORING → ROLLED_BACK.
    PREFLIGHT and STOPPING can end in REFUSED: nothing was changed. RESTORING can end in ROLLBACK_FAILED.
    """

    PREFLIGHT = "PREFLIGHT"
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
        """Whether nothing is left to do for the upgrade."""
        return self in _OVER

    @property
    def refuses(self) -> bool:
        """Whether the upgrade's code version is not started again by itself."""
        return self.is_over and self is not UpgradePhase.STABLE

    @property
    def goes_back(self) -> bool:
        """Whether a rollback is under way, which has to be finished whatever else is wanted."""
        return self in (UpgradePhase.ROLLING_BACK, UpgradePhase.RESTORING)


_OVER = (UpgradePhase.STABLE, UpgradePhase.REFUSED, UpgradePhase.ROLLED_BACK, UpgradePhase.ROLLBACK_FAILED)


@dataclass(frozen=True)
class UpgradeRecord:
    """One upgrade.

    Attributes:
        phase: How far it is.
        from_version: Code version that ran before, where known.
        to_version: Code version it goes to.
        mode: What the new code starts from.
        began_at_ms: When it was begun.
        reason: How it came to this phase.
        old_execution_id: The newest execution before the new code was started.
        starts: How often a start was asked for.
        started_at_ms: When the first execution of the new code began.
        snapshot_id: The snapshot that a rollback goes back to.
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


@dataclass(frozen=True)
class PreflightRecord:
    """What came of running new code on a copy of a stream's state.

    Attributes:
        code_version: Version of the code that was tried.
        passed: Whether a running stream may be stopped for it.
        reason: What happened, for a person.
        batch_id: The batch that was run, None where none could be.
        at_ms: When it ended.
        refused_plan: Fingerprint of the plan, where a person has to accept what is different in it.
    """

    code_version: str | None
    passed: bool
    reason: str
    batch_id: int | None
    at_ms: int
    refused_plan: str | None = None


@dataclass(frozen=True)
class DesiredRecord:
    """A managed stream.

    Attributes:
        stream_id: The stream.
        desired: What was last asked for; None leaves it to the asset's definition.
        generation: Rises with each change of what is wanted and with each upgrade.
        reached: The generation that the world was last brought to.
        request_id: The request that the sensor itself made last for this stream.
        upgrade: The last upgrade, also when it is over.
        preflight: The last preflight.
        alert: What a person has to know, until it is resolved.
        origin: Who changed it last.
        changed_at_ms: When what is wanted was last changed.
        broken: Why the row could not be read as it is, or None; nothing is done for such a stream.
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


class DesiredStateStore:
    """What the catalog knows of managed streams.

    Two write here: people, who say what they want, and the sensor, which says how far it is. The sensor's word counts
    only for the generation it was thought out for, so that it never undoes a person's.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def find(self, stream_id: str) -> DesiredRecord | None:
        """A managed stream; None where nobody has ever said what it is to be."""
        with self._database.reading() as connection:
            return _find(connection, stream_id)

    def all(self) -> dict[str, DesiredRecord]:
        """Every managed stream by its id."""
        with self._database.reading() as connection:
            rows = connection.execute(select(desired_states).order_by(desired_states.c.stream_id))
            return {row.stream_id: _record(row) for row in rows}

    def of(self, stream_ids: Sequence[str]) -> dict[str, DesiredRecord]:
        """Those of these streams that are managed."""
        with self._database.reading() as connection:
            rows = connection.execute(select(desired_states).where(desired_states.c.stream_id.in_(stream_ids)))
            return {row.stream_id: _record(row) for row in rows}

    def ensure(self, stream_id: str, *, origin: str) -> DesiredRecord:
        """The row of a stream that the catalog knows; a new one leaves the desired state to the definition."""
        with self._database.writing() as connection:
            return self._ensure(connection, stream_id, origin)

    def put(
        self, stream_id: str, desired: DesiredState | None, *, origin: str, retry_refused: bool = False
    ) -> DesiredRecord:
        """Say what a stream is to be.

        Args:
            stream_id: A stream that the catalog knows.
            desired: The state; None leaves it to the asset's definition.
            origin: Who says so.
            retry_refused: Forget that a code version was refused or rolled back.
        """
        with self._database.writing() as connection:
            before = self._ensure(connection, stream_id, origin)
            values: dict[str, Any] = {
                "desired": desired.value if desired is not None else None,
                "generation": desired_states.c.generation + 1,
                "alert": None,
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
        reached: bool = False,
        begins: bool = False,
        lease: LeaseRecord | None = None,
    ) -> bool:
        """Record how far the sensor has come; what changes is told as an event.

        Args:
            before: The row it was thought out for.
            upgrade: The upgrade, as it is now.
            alert: What a person has to know; None: nothing.
            request_id: The sensor's last request.
            reached: The world is now what the row asks for.
            begins: An upgrade begins: the generation rises.
            lease: The lease of the stream, where this is the result of work done under it.

        Returns:
            False where somebody has changed what is wanted meanwhile: nothing is recorded.

        Raises:
            LeaseLostError: The lease is not held any more: nothing is recorded.
        """
        with self._database.writing_as(lease) as connection:
            _hold(connection, before.stream_id)
            row = _find(connection, before.stream_id)
            if row is None or row.generation != before.generation:
                return False
            values = {
                "upgrade": as_text(_to_keep(upgrade)) if upgrade is not None else None,
                "alert": alert,
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
        """Record what came of a preflight of a stream that the catalog knows."""
        with self._database.writing() as connection:
            self._ensure(connection, stream_id, "preflight")
            now_ms = self._database.now_ms(connection)
            _change(connection, stream_id, now_ms, {"preflight": as_text(_to_keep(preflight))})

    def _ensure(self, connection: Connection, stream_id: str, origin: str) -> DesiredRecord:
        now_ms = self._database.now_ms(connection)
        new = {"generation": 1, "reached": 0, "origin": origin, "changed_at_ms": now_ms, "updated_at_ms": now_ms}
        self._database.insert_if_absent(connection, desired_states, stream_id=stream_id, **new)
        _hold(connection, stream_id)
        return _get(connection, stream_id)


def _to_keep(record: UpgradeRecord | PreflightRecord) -> dict[str, Any]:
    return asdict(replace(record, reason=without_secrets(record.reason)))


def _of(stream_id: str) -> Any:
    return desired_states.c.stream_id == stream_id


def _hold(connection: Connection, stream_id: str) -> None:
    """On PostgreSQL the row is ours from here to the commit; on SQLite everything is, from the begin."""
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
        values["upgrade"] = _upgrade(upgrade) if upgrade is not None else None
        values["preflight"] = PreflightRecord(**preflight) if preflight is not None else None
    except (KeyError, TypeError, ValueError) as error:
        troubles.append(f"not as this version writes it: {error}")
        values |= {"desired": None, "upgrade": None, "preflight": None}
    return DesiredRecord(**values, broken="; ".join(troubles) or None)


def _upgrade(stored: dict[str, Any]) -> UpgradeRecord:
    return UpgradeRecord(
        **{**stored, "phase": UpgradePhase(stored["phase"]), "mode": UpgradeMode(stored["mode"])},
    )
