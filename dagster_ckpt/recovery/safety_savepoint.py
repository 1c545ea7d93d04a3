"""Before a start rewinds committed batches, the current state is kept under a name."""

from __future__ import annotations

from dagster_ckpt.catalog.records import LeaseRecord, SnapshotRecord, SnapshotTrigger
from dagster_ckpt.errors import CkptError, LeaseLostError, RestoreError
from dagster_ckpt.recovery.plan import RecoveryFacts, RecoveryPlan, Restore, Rewind
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import describe_snapshot, is_owned_by_stream
from dagster_ckpt.stream.start_from import StartFrom, StartPoint
from dagster_ckpt.stream.stopped_savepoint import savepoint_of_stopped_stream

LABEL = "before-rewind-"


def leaves_something_behind(plan: RecoveryPlan, start_from: StartFrom) -> bool:
    if not isinstance(plan, Restore | Rewind):
        return False
    # Positions of former sources would be lost with the directory.
    goes_back = plan.rewound_batches > 0 and start_from.point is not StartPoint.LATEST
    return goes_back or plan.sources is not None


def describe_safety_savepoint(facts: RecoveryFacts, plan: RecoveryPlan) -> str | None:
    if not leaves_something_behind(plan, facts.start_from):
        return None
    if facts.start_from.no_safety_savepoint:
        return f"no safety savepoint is taken: state and output after batch {plan.to_batch} can be lost permanently"
    kept = f"before that, a savepoint {LABEL}<n> of batch {plan.from_batch} is taken, so that you can return to it"
    return kept + _unedited(facts, plan)


def _unedited(facts: RecoveryFacts, plan: RecoveryPlan) -> str:
    if plan.snapshot is None or set(plan.snapshot.state_edits) <= set(facts.stream.state_edits):
        return ""
    return (
        f"; it contains the state from before the edit of {describe_snapshot(plan.snapshot)}: delete it if that must "
        "not stay, or start with no_safety_savepoint"
    )


def take_safety_savepoint(
    stream: StreamHandle, facts: RecoveryFacts, plan: RecoveryPlan, start_from: StartFrom, lease: LeaseRecord
) -> str | None:
    """Before a rewind, take a savepoint of the current state; if that is impossible, tag its newest snapshot.

    Returns what was kept, for a message, if anything.
    """
    if start_from.no_safety_savepoint or not leaves_something_behind(plan, start_from):
        return None
    label = f"{LABEL}{stream.catalog.streams.get(stream.stream_id).next_number}"
    why = "the live directory is not intact"
    if facts.live is not None and facts.live.status is LiveStatus.GOOD:
        try:
            kept = savepoint_of_stopped_stream(stream, label=label, trigger=SnapshotTrigger.REWIND, lease=lease)
        except LeaseLostError:
            raise
        except CkptError as error:
            why = str(error)
        else:
            took = f"took the savepoint {label} at batch {kept.batch_id}: start from it to undo the rewind"
            return took + _unedited(facts, plan)
    newest = next((snapshot for snapshot in facts.snapshots if (snapshot.batch_id or 0) > (plan.to_batch or 0)), None)
    if newest is None:
        if facts.live is None or facts.live.status is not LiveStatus.GOOD:
            return None
        raise RestoreError(
            f"Stream {stream.stream_id!r} is not started ({plan.reason}), nothing was changed: no savepoint of its "
            f"current position could be taken, and it has no snapshot newer than batch {plan.to_batch}: {why} Repair "
            "that, or start with no_safety_savepoint; the rewind then cannot be undone."
        )
    return _tag(stream, newest, label, why, lease) + _unedited(facts, plan)


def _tag(stream: StreamHandle, snapshot: SnapshotRecord, label: str, why: str, lease: LeaseRecord) -> str:
    if not is_owned_by_stream(snapshot):
        return f"{describe_snapshot(snapshot)} stays, so that you can return to it ({why})"
    stream.catalog.holds.tag(snapshot.snapshot_id, label=label, holder="the rewind after it", lease=lease)
    return f"tagged {describe_snapshot(snapshot)} as {label}, so that you can return to it until it is released ({why})"
