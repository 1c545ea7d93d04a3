"""A stream whose upgrade failed: a savepoint, and batches of the new code after it."""

from __future__ import annotations

from typing import Any

from dagster_ckpt.catalog.desired_states import DesiredRecord, UpgradePhase, UpgradeRecord
from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.policies.upgrade import UpgradeMode
from dagster_ckpt.stream.handle import StreamHandle
from tests.support import verbs
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History

WRONG = LAST + 2


def upgrade_in(stream: StreamHandle, phase: UpgradePhase, snapshot_id: str | None, **more: Any) -> None:
    row = stream.catalog.desired_states.ensure(STREAM, origin="a test")
    mode, why = UpgradeMode.SAVEPOINT, "no batch in time"
    upgrade = UpgradeRecord(phase, "1", "2", mode, 1, why, snapshot_id=snapshot_id, **more)
    assert stream.catalog.desired_states.advance(row, upgrade=upgrade, alert=None, request_id=None)


def failed_upgrade(history: History) -> SnapshotRecord:
    """A savepoint at the last batch, and two batches of the new code after it."""
    savepoint = verbs.trigger_savepoint(history.shelf.stream, origin="a test", label="before")
    for batch in range(LAST + 1, WRONG + 1):
        history.commit(batch)
    upgrade_in(history.shelf.stream, UpgradePhase.RESTORING, savepoint.snapshot_id)
    assert (history.batch, history.sink_batch) == (WRONG, WRONG)
    return savepoint


def row(history: History) -> DesiredRecord:
    return history.shelf.stream.catalog.desired_states.all()[STREAM]
