"""What a start would do, found out in advance: from the catalog, the storage and the sinks, or also with its code.

Nothing here changes anything, and the query may be running.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.catalog.recoveries import PointFailure
from dagster_ckpt.client.requests import is_running
from dagster_ckpt.config.state_backend import OnStateChange
from dagster_ckpt.errors import CkptError, InputGoneError, LiveDirectoryError
from dagster_ckpt.recovery.damage import is_suspicious
from dagster_ckpt.recovery.examination import Examiner
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.plan import RecoveryFacts, RecoveryKind, RecoveryPlan
from dagster_ckpt.recovery.plan_check import PlanChange, check_state, plan_change
from dagster_ckpt.recovery.planning import plan_recovery, with_newer_point
from dagster_ckpt.recovery.replay import lost_batches
from dagster_ckpt.recovery.rewind_preview import RewindPreview, preview_rewind, refuse_loss
from dagster_ckpt.recovery.sink_survey import refuse_shared_folder
from dagster_ckpt.recovery.source_change import refuse_changed_sources
from dagster_ckpt.recovery.source_check import refuse_gone_records, resolved_offsets
from dagster_ckpt.spark.query.description import NamedOutput, is_described_query, named_output, session_of
from dagster_ckpt.spark.query.plan import plan_of_writer
from dagster_ckpt.spark.query.source_identity import source_identities
from dagster_ckpt.state.shape import StateShape
from dagster_ckpt.stream.adopted import refuse_unclaimed
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import holding
from dagster_ckpt.stream.start_from import StartFrom, StartPoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_T = TypeVar("_T")


def planned_start(stream: StreamHandle, start_from: StartFrom) -> RecoveryPlan:
    """The plan of a start, as far as the catalog and the storage tell. No sink is asked."""
    return plan_recovery(recovery_facts(stream, start_from, predecessor_ended=True, remembers=False))


def start_preview(stream: StreamHandle, start_from: StartFrom, known: RewindPreview | None = None) -> RewindPreview:
    """See `Client.preview_rewind`. Returns `known` if the start would still continue from the same point."""
    if known is not None and _still_holds(known.plan, planned_start(stream, start_from)):
        return known
    facts = recovery_facts(stream, start_from, predecessor_ended=True, remembers=False)
    while True:
        plan = plan_recovery(facts)
        try:
            with holding(stream.catalog, [plan.snapshot], "preview"):
                ahead = _ahead(stream, facts, plan)
                newer = with_newer_point(facts, plan, ahead.gone) if ahead.gone and not start_from.accept_loss else None
                if newer is not None:
                    facts = newer
                    continue
                return replace(ahead, state=tuple(_check_rewrite(stream, ahead.plan, start_from)))
        except CkptError as error:
            if plan.point is None or start_from.point is not StartPoint.LATEST or not is_suspicious(error):
                raise
            damage = Examiner(stream).damage_of_point(plan)
            if damage is None:
                raise
            # The start will skip it as well.
            failed = PointFailure(0, "preview", plan.point, damage.error, damage.detail, True, plan.to_batch, 0)
            facts = replace(facts, failures=[*facts.failures, failed])


def _still_holds(known: RecoveryPlan, now: RecoveryPlan) -> bool:
    """Whether a start would continue from the same point. A query that ran on since is not another point."""
    if now.kind is RecoveryKind.REWIND and known.to_batch != now.to_batch:
        return False
    replays = known.kind is RecoveryKind.REPLAY and now.kind is RecoveryKind.RESTORE
    return (replays or known.kind is now.kind) and _how(known) == _how(now)


def _how(plan: RecoveryPlan) -> tuple[object, ...]:
    snapshot_id = plan.snapshot.snapshot_id if plan.snapshot is not None else None
    return snapshot_id, plan.new_query_id, plan.claims, plan.source_offsets


def listed_snapshot(stream: StreamHandle, snapshot: SnapshotRecord | None) -> SnapshotRecord | None:
    """The snapshot as the catalog lists it at this location, or None."""
    if snapshot is None:
        return None
    listed = stream.catalog.snapshots.by_id([snapshot.snapshot_id]).get(snapshot.snapshot_id)
    return listed if listed is not None and listed.location == snapshot.location else None


def _ahead(
    stream: StreamHandle,
    facts: RecoveryFacts,
    plan: RecoveryPlan,
    output: NamedOutput | None = None,
    session: SparkSession | None = None,
) -> RewindPreview:
    lost, running = lost_batches(stream, facts, plan, output), is_running(stream)
    replayed = plan if lost is None else lost.in_plan(plan)
    ahead = preview_rewind(stream, facts, replayed, output, session, is_running=running)
    if lost is not None and ahead.gone:
        # As the start does: it replays nothing that the sources no longer have.
        ahead = preview_rewind(stream, facts, plan, output, session, is_running=running)
    return ahead


def _check_rewrite(stream: StreamHandle, plan: RecoveryPlan, start_from: StartFrom) -> Sequence[str]:
    """Refuse a rewrite of state that the start would refuse, before a running query is suspended for it."""
    if start_from.state_partitions is not None:
        return check_state(stream, plan, start_from).messages
    if stream.on_backend_change is OnStateChange.CONVERT:
        # The start recovers from a live directory that cannot be read.
        with suppress(LiveDirectoryError):
            return check_state(stream, plan, start_from).messages
    return ()


@dataclass(frozen=True)
class StartCheck:
    """A start that its sinks, its sources and the stored state do not refuse.

    Attributes:
        rewrite: The shape that the state would be rewritten to; None if it stays as it is.
        change: How the query's plan differs from the one that wrote the state, as far as known.
    """

    plan: RecoveryPlan
    rewrite: StateShape | None
    change: PlanChange | None


def check_start(
    stream: StreamHandle,
    describe: Callable[[], DataStreamWriter],
    start_from: StartFrom,
    *,
    report: Callable[[str], None],
) -> StartCheck:
    """Check a start with the loaded code, as the start itself would; raises the error that it would raise.

    A query that cannot be described refuses nothing here: its start reports that.

    Args:
        stream: The stream.
        describe: Creates the unstarted writer.
        start_from: Where it would start.
        report: Called with a message for everything that would change.
    """
    record = stream.catalog.streams.get(stream.stream_id)
    output = _told(describe, named_output)
    facts = recovery_facts(stream, start_from, predecessor_ended=True, remembers=False, output=output)
    while True:
        plan = resolved_offsets(stream, plan_recovery(facts), describe)
        with holding(stream.catalog, [plan.snapshot], "check of a start"):
            refuse_unclaimed(stream, plan.snapshot)
            for message in refuse_changed_sources(stream, plan, _told(describe, source_identities)):
                report(message)
            try:
                ahead = _ahead(stream, facts, plan, output, _told(describe, _session))
                refuse_loss(stream, ahead, accept_loss=start_from.accept_loss)
                gone = refuse_gone_records(stream, plan, describe, accept_loss=start_from.accept_loss)
            except InputGoneError as error:
                newer = with_newer_point(facts, plan, error.gone)
                if newer is None:
                    raise
                facts = newer
                continue
            for message in gone:
                report(f"accepted without these records: {message}")
            checked = check_state(stream, plan, start_from)
            for message in checked.messages:
                report(message)
            change = plan_change(record, plan, _told(describe, plan_of_writer))
            for difference in change.differences if change is not None else ():
                report(f"the plan differs: {difference}")
            refuse_shared_folder(stream, output)
            return StartCheck(plan, checked.rewrite, change)


def _told(describe: Callable[[], DataStreamWriter], ask: Callable[[DataStreamWriter], _T]) -> _T | None:
    """What a query tells of itself; None if it cannot be created."""
    try:
        return ask(describe())
    except Exception:  # noqa: BLE001 - the start fails in the same way and reports it
        return None


def _session(writer: DataStreamWriter) -> SparkSession | None:
    return session_of(writer) if is_described_query(writer) else None
