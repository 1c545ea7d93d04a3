"""Previews retention policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus
from dagster_ckpt.policies.retention import (
    KeptBecause,
    RetainedSnapshot,
    RetentionContext,
    RetentionDecision,
    RetentionPolicy,
    bytes_of,
    decide_retention,
    needed_for_recovery,
    reasons_to_keep,
)
from dagster_ckpt.recovery.checkpoint_retention import retained_by_policy, subsumption, to_retain
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import describe_snapshot, is_owned_by_stream, retained
from dagster_ckpt.values.durations import size, utc_time
from dagster_ckpt.values.validation import policy_name

_GUARD = {
    KeptBecause.NEWEST: "a recovery may need it",
    KeptBecause.PROVEN: "the newest one whose state was loaded",
    KeptBecause.IN_USE: "it is in use",
    KeptBecause.POLICY_FAILED: "the policy failed",
}
# Includes snapshots that have been deleted since, for any reason.
_PAST = (SnapshotStatus.COMPLETED, SnapshotStatus.DELETING, SnapshotStatus.DELETED)


@dataclass(frozen=True)
class PreviewedSnapshot:
    """A checkpoint; without reasons to keep it, it would be deleted."""

    snapshot_id: str
    name: str
    taken_at_ms: int
    full_bytes: int
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class RetentionPreview:
    """Result of `Client.preview_retention`.

    Attributes:
        kept_bytes: Of those that would be kept; what they share counts once.
        most_bytes: With the history, the most that were kept at any time.
        problem: Why the policy's answer could not be used: nothing would be deleted.
    """

    stream_id: str
    policy: str
    snapshots: tuple[PreviewedSnapshot, ...]
    kept_bytes: int
    most_bytes: int | None = None
    problem: str | None = None

    @property
    def deleted(self) -> tuple[PreviewedSnapshot, ...]:
        return tuple(each for each in self.snapshots if not each.reasons)

    def messages(self) -> list[str]:
        kept = len(self.snapshots) - len(self.deleted)
        most = f"; at most {size(self.most_bytes)} at any time" if self.most_bytes is not None else ""
        return [
            *([f"the policy failed, so nothing would be deleted: {self.problem}"] if self.problem else []),
            *(
                f"{utc_time(each.taken_at_ms)}  {each.name}: "
                + (f"kept ({', '.join(each.reasons)})" if each.reasons else "deleted")
                for each in self.snapshots
            ),
            f"{self.policy} keeps {kept} of {len(self.snapshots)} checkpoints, {size(self.kept_bytes)}{most}",
        ]


def preview_retention(stream: StreamHandle, policy: RetentionPolicy, *, history: bool) -> RetentionPreview:
    if history:
        return _replayed(stream, policy)
    snapshots = retained_by_policy(stream)
    context = RetentionContext(stream.catalog.now_ms())
    return _preview(stream, policy, snapshots, subsumption(stream, snapshots, policy, context), context)


def _replayed(stream: StreamHandle, policy: RetentionPolicy) -> RetentionPreview:
    """`needed_for_recovery` keeps what a recovery would have taken first at each time, without damage known by now.

    Which snapshots were proven, tagged or in use then is not recorded.
    """
    listed = stream.catalog.snapshots.of_stream(stream.stream_id, status=None)
    past = [
        each
        for each in reversed(listed)
        if each.status in _PAST
        and each.completed_at_ms
        and (stream.options.count_savepoints or is_owned_by_stream(each))
    ]
    past.sort(key=lambda each: (each.timeline, each.number or 0))
    everything, queue, most = [retained(each) for each in past], list[RetainedSnapshot](), 0
    broken = {each.snapshot_id for each in past if each.verified_problem is not None}
    decision, context = RetentionDecision({}), RetentionContext(stream.catalog.now_ms())
    for number, each in enumerate(everything, start=1):
        queue.append(each)
        context = RetentionContext(each.taken_at_ms)
        intact = [one for one in queue if one.snapshot_id not in broken]
        needed = needed_for_recovery(queue) | needed_for_recovery(intact)
        decision = decide_retention(policy, queue, context, needed=needed)
        queue = [one for one in queue if one.snapshot_id in decision.kept]
        most = max(most, bytes_of(queue, everything[:number]))
    return _preview(stream, policy, past, decision, context, most_bytes=most, among=queue)


def _preview(
    stream: StreamHandle,
    policy: RetentionPolicy,
    snapshots: Sequence[SnapshotRecord],
    decision: RetentionDecision,
    context: RetentionContext,
    *,
    most_bytes: int | None = None,
    among: Sequence[RetainedSnapshot] | None = None,
) -> RetentionPreview:
    """Explain a decision; `among` are those that the policy saw last, if not all."""
    queue = to_retain(stream, snapshots, policy)
    rules = reasons_to_keep(policy, queue if among is None else among, context) if decision.problem is None else {}
    reasons = {
        snapshot_id: (*rules.get(snapshot_id, ()), *([_GUARD[because]] if because in _GUARD else []))
        for snapshot_id, because in decision.kept.items()
    }
    return RetentionPreview(
        stream.stream_id,
        policy_name(policy),
        tuple(
            PreviewedSnapshot(
                each.snapshot_id,
                describe_snapshot(each),
                each.completed_at_ms or 0,
                each.full_bytes or 0,
                reasons.get(each.snapshot_id, ()),
            )
            for each in snapshots
        ),
        bytes_of([each for each in queue if each.snapshot_id in decision.kept], queue),
        most_bytes,
        decision.problem,
    )
