"""Rolls back an upgrade: the stream's state and sinks return to where the previous code stopped."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace

from dagster_ckpt.catalog.desired_states import UpgradePhase, UpgradeRecord
from dagster_ckpt.errors import (
    RequestFailedError,
    RestoreError,
    SharedSinkError,
    SinkRollbackError,
    SnapshotCorruptError,
    SnapshotNotFoundError,
    StorageAccessError,
)
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.prepare import prepare
from dagster_ckpt.recovery.rewind_preview import preview_rewind, refuse_loss
from dagster_ckpt.sinks.registry import output_of
from dagster_ckpt.stream.fencing import fence_predecessor
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import sinks_of_snapshot
from dagster_ckpt.stream.lease import LeaseKeeper, acquire
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.ownership import check_places
from dagster_ckpt.stream.snapshots import describe_snapshot
from dagster_ckpt.stream.start_from import StartFrom

# A retry does not help: a user must decide where the stream continues.
_FINAL = (SnapshotNotFoundError, SnapshotCorruptError, RestoreError, SharedSinkError)


def roll_back(
    stream: StreamHandle, *, run_id: str, report: Callable[[str], None] = lambda _sentence: None
) -> UpgradeRecord:
    """Roll a stream back to the snapshot taken before a failed upgrade; its next start continues there.

    Can be interrupted anywhere and repeated: the upgrade is marked only once it is done.

    Args:
        stream: The stream; it must not be running.
        run_id: The run that performs it, as shown by the lease.
        report: Called with a message for every step.

    Returns:
        The upgrade, ROLLED_BACK or ROLLBACK_FAILED.

    Raises:
        RequestFailedError: The stream has no upgrade to roll back.
        LeaseHeldError: The stream is running.
        LeaseLostError: The stream was started in the meantime.
        LiveDirectoryError: Its folder of live directories belongs to another deployment.
        StorageAccessError: Something could not be read or written; try again.
    """
    row = stream.catalog.desired_states.find(stream.stream_id)
    upgrade = row.upgrade if row is not None else None
    if row is None or upgrade is None or upgrade.phase is not UpgradePhase.RESTORING or upgrade.snapshot_id is None:
        raise RequestFailedError(
            f"Stream {stream.stream_id!r} has no upgrade to roll back. To go back to a snapshot use restart_stream_job."
        )
    holder = this_holder(f"rollback-{uuid.uuid4()}", run_id, None)
    acquired = acquire(stream.catalog, stream.stream_id, holder)
    with LeaseKeeper(stream.catalog, acquired.record) as lease:
        check_places(stream, None, predecessor_ended=acquired.predecessor_ended)
        fence_predecessor(stream, acquired, still_mine=lease.check)
        try:
            source = _restore(stream, upgrade.snapshot_id, lease, report)
        except _FINAL as error:
            reason = f"{upgrade.reason}; the stream is stopped and cannot be rolled back: {error}"
            after = replace(upgrade, phase=UpgradePhase.ROLLBACK_FAILED, reason=reason)
        else:
            reason = f"rolled back to {source}, because: {upgrade.reason}"
            after = replace(upgrade, phase=UpgradePhase.ROLLED_BACK, reason=reason)
        alert = f"code version {after.to_version}: {reason}"
        stream.catalog.desired_states.advance(
            row, upgrade=after, alert=alert, request_id=row.request_id, lease=lease.record
        )
    return after


def _restore(stream: StreamHandle, snapshot_id: str, lease: LeaseKeeper, report: Callable[[str], None]) -> str:
    facts = recovery_facts(stream, StartFrom(snapshot_id), predecessor_ended=True)
    plan = plan_recovery(facts)
    # The previous code, which wrote the snapshot, is about to start: what the new code wrote
    # elsewhere is left.
    output = output_of(sinks_of_snapshot(stream, plan.snapshot)) if plan.snapshot is not None else None
    preview = preview_rewind(stream, facts, plan, output)
    for message in preview.messages():
        report(message)
    if preview.undone_edits:
        raise RestoreError(
            f"this would undo an edit of the state: {', '.join(preview.undone_edits)}. Decide where the stream "
            "continues: restart it from the snapshot of your choice."
        )
    refuse_loss(stream, preview, accept_loss=False)
    try:
        prepared = prepare(stream, plan, lease, output, survey=preview.survey)
    except SinkRollbackError as error:
        # Refusals were raised earlier: a file could not be read or written, and the next try
        # continues there.
        raise StorageAccessError(str(error)) from error
    for place in prepared.rolled_back:
        report(f"rolled back the sink {place}")
    return describe_snapshot(stream.catalog.snapshots.get(snapshot_id))
