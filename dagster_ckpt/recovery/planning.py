"""Decides what an execution starts from. Pure: facts in, a plan or an error out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dagster_ckpt.catalog.pending_restore import Emptied, Forked, PendingRestore, SinkRollBack, ToBatch, ToSnapshot
from dagster_ckpt.catalog.records import OriginKind, SnapshotRecord
from dagster_ckpt.errors import LiveDirectoryError, RecoveryExhaustedError, SnapshotNotFoundError, StateAtRiskError
from dagster_ckpt.recovery.plan import (
    Clone,
    FinishRestore,
    MappedSources,
    PassedPoint,
    RecoveryFacts,
    RecoveryPlan,
    Restore,
    Resume,
    Rewind,
    StartEmpty,
    skipped_distance,
)
from dagster_ckpt.recovery.recovery_points import (
    RecoveryPoint,
    batch_of,
    batch_point,
    failed_points,
    finish_point,
    live_point,
    recovery_points,
)
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveState, LiveStatus
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import Donor, DonorCheck
from dagster_ckpt.stream.known_sinks import lacks_the_log
from dagster_ckpt.stream.ownership import Adopted, adopted_directory, refuse_unfinished_adoption
from dagster_ckpt.stream.snapshots import describe_snapshot, named, newest_for_recovery
from dagster_ckpt.stream.start_from import StartPoint
from dagster_ckpt.values.modes import RecoveryClaimMode, SnapshotKind


def plan_recovery(facts: RecoveryFacts) -> RecoveryPlan:
    plan, mapping = _planned(facts), facts.start_from.source_mapping
    return plan if mapping is None else _with_sources(facts, plan, MappedSources(mapping))


def _with_sources(facts: RecoveryFacts, plan: RecoveryPlan, sources: MappedSources) -> RecoveryPlan:
    """Add a change of sources to a plan; a live directory is then re-created at its newest batch."""
    reason = f"{plan.reason}; its sources change: {sources.mapping}"
    match plan:
        case Restore() | Rewind():
            return replace(plan, sources=sources, reason=reason)
        case Resume(from_batch=int(batch_id)) | Clone(from_batch=int(batch_id)):
            # The batch in flight was planned for the former sources, so a sink that has it undoes it.
            return Rewind(
                reason=reason,
                from_batch=batch_id,
                to_batch=batch_id,
                point=batch_point(facts.stream.live_directory or "", batch_id),
                sources=sources,
            )
        case Resume() | Clone():
            raise LiveDirectoryError(
                f"Stream {facts.stream.stream_id!r} cannot change its sources: its live directory has no committed "
                "batch yet, so there are no positions to keep. Start it with start_from=empty and discard_state."
            )
        case _:
            # The unfinished restore may be this change of sources, which their comparison shows.
            return plan


def _planned(facts: RecoveryFacts) -> RecoveryPlan:
    refuse_unfinished_adoption(facts.stream)
    if facts.start_from.point is StartPoint.EMPTY:
        _refuse_unconfirmed_discard(facts)
        return StartEmpty(
            reason="start_from=empty: all state is discarded, the query reads its sources from the beginning",
            from_batch=facts.live_batch,
        )
    _refuse_unregistered_state(facts)
    if facts.start_from.point is StartPoint.BATCH:
        return _back_to_batch(facts)
    if facts.start_from.point is not StartPoint.LATEST:
        snapshot = _asked_for(facts)
        claims = facts.start_from.claim_mode is RecoveryClaimMode.CLAIM
        owned = ", which the stream owns from now on and deletes when it is subsumed (CLAIM)" if claims else ""
        return Restore(
            reason=f"start_from={facts.start_from}: {describe_snapshot(snapshot)}{owned}{_elsewhere(facts)}",
            snapshot=snapshot,
            from_batch=facts.live_batch,
            new_query_id=facts.start_from.new_query_id,
            claims=claims,
            donor=_donor(facts),
            rewound_ms=facts.time_since(snapshot),
            source_offsets=facts.start_from.chosen_offsets,
        )
    try:
        plan = _latest(facts)
    except RecoveryExhaustedError:
        if not facts.undone.points:
            raise
        return _planned(replace(facts, undone=facts.undone.kept("no point that it may use is without them")))
    why = facts.undone.why_kept
    return replace(plan, reason=f"{plan.reason}; it keeps rows that were undone upstream: {why}") if why else plan


def with_newer_point(facts: RecoveryFacts, plan: RecoveryPlan, gone: str) -> RecoveryFacts | None:
    """Exclude a plan's point, whose input is gone; None if a user named it or no other point is left."""
    if not facts.start_from.chooses_its_point or not isinstance(plan, Restore | Rewind):
        return None
    beyond = replace(facts, without_input={**facts.without_input, plan.point: f"its input is gone. {gone}"})
    try:
        plan_recovery(beyond)
    except (RecoveryExhaustedError, LiveDirectoryError):
        return None
    return beyond


def _elsewhere(facts: RecoveryFacts) -> str:
    chosen = facts.start_from.source_offsets
    return f"; its sources continue at {chosen}" if chosen else ""


def _latest(facts: RecoveryFacts) -> RecoveryPlan:
    stream, live = facts.stream, facts.live
    failed = failed_points(facts.failures)
    adopted = adopted_directory(stream)
    if adopted is not None and adopted.is_pending:
        return _from_adopted_directory(facts, adopted)
    if stream.pending_restore is not None and _can_be_finished(facts, stream.pending_restore):
        point = finish_point(stream.live_directory or "")
        if point in failed:
            return _go_back(facts, "an earlier restore cannot be finished", PassedPoint("that restore", failed[point]))
        match stream.pending_restore:
            case Forked(of_stream_id=original, batch_id=batch_id, imported_from=location):
                what = "a fork" if location is None else "an import"
                reason = f"{what} of stream {original} after its batch {batch_id}"
            case _:
                reason = "an earlier restore was interrupted before the sinks were rolled back: it is finished first"
        return FinishRestore(reason=reason, point=point)
    if live is None:
        return _go_back(facts, "the stream has no live directory yet")
    if live.status is LiveStatus.GOOD:
        point = live_point(stream.live_directory or "")
        if point not in failed:
            if (why := facts.undone.points.get(point)) is not None:
                return _go_back(facts, "a stream upstream went back", PassedPoint("the live directory", why))
            return _from_good_live_directory(facts, live)
        return _go_back(
            facts, "the query failed in the live directory", PassedPoint("the live directory", failed[point])
        )
    return _go_back(facts, f"the live directory is {live.status.value.lower()}: {live.reason.rstrip('.')}")


def _back_to_batch(facts: RecoveryFacts) -> RecoveryPlan:
    batch_id = facts.start_from.batch_id
    if batch_id is None or batch_id not in facts.retained:
        retained = f"batches {facts.retained[0]} to {facts.retained[-1]}" if facts.retained else "no batch"
        snapshots = ", ".join(describe_snapshot(snapshot) for snapshot in facts.all_snapshots[:8]) or "none"
        raise LiveDirectoryError(
            f"Stream {facts.stream.stream_id!r} cannot go back to batch {batch_id} in its live directory, which "
            f"retains {retained} (spark.sql.streaming.minBatchesToRetain sets how many Spark keeps). Name one of "
            f"these, or a snapshot: {snapshots}."
        )
    return Rewind(
        reason=f"start_from={facts.start_from}: go back in the live directory's own files{_elsewhere(facts)}",
        from_batch=facts.live_batch,
        to_batch=batch_id,
        new_query_id=facts.start_from.new_query_id,
        point=batch_point(facts.stream.live_directory or "", batch_id),
        source_offsets=facts.start_from.chosen_offsets,
    )


def _donor(facts: RecoveryFacts) -> Donor | None:
    if facts.live is None or facts.live.status is not LiveStatus.GOOD or facts.stream.live_directory is None:
        return None
    # A user who goes back or names a snapshot may distrust the current files.
    names_a_snapshot = facts.start_from.point in (StartPoint.NAMED, StartPoint.PREFERRED_SAVEPOINT)
    is_trusted = facts.ended_in_order and facts.predecessor_ended and facts.is_automatic and not names_a_snapshot
    check = DonorCheck.IDENTITY if is_trusted else DonorCheck.DIGEST
    return Donor(LiveDirectory(facts.stream.live_directory), check)


def _from_good_live_directory(facts: RecoveryFacts, live: LiveState) -> RecoveryPlan:
    if facts.predecessor_ended and live.fenced_at is None:
        return Resume(
            reason=f"the live directory is intact and its last writer has ended: resume after batch {live.batch_id}",
            from_batch=live.batch_id,
            point=live_point(facts.stream.live_directory or ""),
        )
    return Clone(
        reason=f"the last writer may still be alive: continue after batch {live.batch_id} in a new directory",
        from_batch=live.batch_id,
        point=live_point(facts.stream.live_directory or ""),
    )


def _from_adopted_directory(facts: RecoveryFacts, adopted: Adopted) -> RecoveryPlan:
    live = facts.live
    if live is None or live.status is not LiveStatus.GOOD:
        why = "it does not exist" if live is None or live.status is LiveStatus.MISSING else live.reason.rstrip(".")
        raise LiveDirectoryError(
            f"Stream {facts.stream.stream_id!r} cannot continue in the directory that was adopted for it, "
            f"{adopted.directory}: {why}. Nothing was changed. Put it back or repair it, or name the snapshot that was "
            "taken when it was adopted, or a later one, with start_from: that goes back to the batch of the snapshot."
        )
    in_place = adopted.in_place and facts.predecessor_ended
    where = "there" if in_place else "in a copy of it"
    return (Resume if in_place else Clone)(
        reason=f"{adopted.directory} was adopted: its query is fenced, and this one continues {where} after its newest "
        f"batch ({live.batch_id} when the start looked)",
        from_batch=live.batch_id,
        point=live_point(adopted.directory),
    )


def _can_be_finished(facts: RecoveryFacts, pending: PendingRestore) -> bool:
    live = facts.live
    if isinstance(pending, SinkRollBack) and live is not None and live.status is LiveStatus.GOOD:
        # A query runs only after the sinks are rolled back. If one has run, the catalog is older than the directory.
        to_batch = pending.batch_id if isinstance(pending, ToSnapshot | ToBatch) else -1
        if to_batch is not None and live.batch_id is not None and live.batch_id > to_batch:
            return False
    # An empty start has no directory yet. One restored or rewound may be lost before its query starts.
    return isinstance(pending, Emptied) or (live is not None and live.status is LiveStatus.GOOD)


def _go_back(facts: RecoveryFacts, why: str, *passed: PassedPoint) -> RecoveryPlan:
    failed = failed_points(facts.failures)
    points = recovery_points(
        facts.stream,
        _in_order(facts),
        batch_is_retained=facts.origin_batch_is_retained,
        snapshot_is_gone=facts.origin_snapshot_is_gone,
    )
    over = list(passed)
    # An older point reads the same again, and more.
    needs = max((batch_of(point) for point in points if point.name in facts.without_input), default=None)
    for point in points[: facts.depth]:
        if needs is not None and batch_of(point) <= needs and point.name not in facts.without_input:
            continue
        bad = (
            facts.without_input.get(point.name)
            or failed.get(point.name)
            or _known_to_be_broken(facts, point)
            or facts.undone.why_not(point.name)
        )
        if bad is None:
            return _from_point(facts, why, point, tuple(over))
        cost = facts.batches_since(point.batch_id), facts.time_since(point.snapshot)
        over.append(PassedPoint(_describe_point(point), bad, *cost))
    if points or passed:
        raise RecoveryExhaustedError(_exhausted(facts, why, over, len(points)))
    return _without_a_point(facts, why)


def _from_point(facts: RecoveryFacts, why: str, point: RecoveryPoint, passed: tuple[PassedPoint, ...]) -> RecoveryPlan:
    instead = "".join(f"; not {each.name}: {each.why}" for each in passed)
    if point.snapshot is not None:
        skipped = _skipped_points(facts, point.snapshot)
        return Restore(
            reason=f"{why}; restore {describe_snapshot(point.snapshot)}{skipped}{instead}",
            snapshot=point.snapshot,
            from_batch=facts.live_batch,
            passed=passed,
            rewound_ms=facts.time_since(point.snapshot),
        )
    return Rewind(
        reason=f"{why}; go back to {_describe_point(point)}, from which it was created{instead}",
        from_batch=facts.live_batch,
        to_batch=batch_of(point),
        directory=point.directory,
        point=point.name,
        passed=passed,
    )


def _in_order(facts: RecoveryFacts) -> list[SnapshotRecord]:
    rest, ordered = list(facts.snapshots), []
    while (snapshot := newest_for_recovery(rest, prefer_checkpoint=facts.prefer_checkpoint)) is not None:
        ordered.append(snapshot)
        rest.remove(snapshot)
    return ordered


def _known_to_be_broken(facts: RecoveryFacts, point: RecoveryPoint) -> str | None:
    if facts.damaged_logs and (lacking := _lacks_logs(facts, point)) is not None:
        return lacking
    # A user may try it, since it may have been repaired and digests are compared.
    problem = point.snapshot.verified_problem if point.snapshot is not None and facts.is_automatic else None
    return None if problem is None else f"a verification found it broken: {problem}"


def _lacks_logs(facts: RecoveryFacts, point: RecoveryPoint) -> str | None:
    if point.snapshot is not None:
        return lacks_the_log(point.snapshot, facts.damaged_logs)
    return f"the log of {facts.damaged_logs[0].folder}, which is damaged, cannot be rolled back there"


def _describe_point(point: RecoveryPoint) -> str:
    if point.snapshot is not None:
        return describe_snapshot(point.snapshot)
    return f"batch {point.batch_id} of {point.directory}"


def _exhausted(facts: RecoveryFacts, why: str, passed: Sequence[PassedPoint], points: int) -> str:
    looked_at = "\n".join(f"- {each.name}: {each.why}" for each in passed)
    beyond = "" if facts.depth is None or points <= facts.depth else f" (recovery_depth={facts.depth} of {points})"
    return (
        f"Stream {facts.stream.stream_id!r} cannot be recovered automatically: {why}, and every recovery point is "
        f"damaged{beyond}. This start changed nothing, and no automatic start follows.\n"
        f"{looked_at}\n"
        f"{_not_undone(facts)}"
        "Repair one of them and start the stream by hand (its job on Dagster's page, restart_stream_job, or its "
        "program on a terminal), which tries all of them again; or name another snapshot or its location with "
        "start_from; or discard the state with start_from=empty and discard_state."
    )


def _without_a_point(facts: RecoveryFacts, why: str) -> RecoveryPlan:
    stream, live = facts.stream, facts.live
    if (live is None or stream.live_directory is None) and facts.before_the_edit:
        raise LiveDirectoryError(
            f"Stream {stream.stream_id!r} cannot be recovered automatically: {why}, and no snapshot has its edited "
            f"state. {_not_undone(facts)}Name one of them with start_from to undo the edit, or discard the state with "
            "start_from=empty and discard_state."
        )
    if live is None or stream.live_directory is None:
        return StartEmpty(reason=f"{why} and there is no snapshot: start empty")
    began_empty = stream.origin is not None and stream.origin.kind is OriginKind.EMPTY and facts.last_batch is None
    if began_empty and live.status is LiveStatus.EMPTY:
        reason = "the query has not committed a batch yet: it starts from the beginning"
        if facts.predecessor_ended and live.fenced_at is None:
            return Resume(reason=reason, point=live_point(stream.live_directory))
        return StartEmpty(reason=reason)
    if began_empty and live.status is LiveStatus.MISSING and not facts.has_run:
        # The first start switched to it but started no query: nothing is lost.
        return StartEmpty(reason=f"{why} and there is no snapshot: start empty")
    raise LiveDirectoryError(
        f"Stream {stream.stream_id!r} cannot be recovered automatically: {why} ({stream.live_directory}), and the "
        f"catalog has no restorable snapshot of it. {_not_undone(facts)}"
        "Put the live directory back, name a snapshot with start_from (a "
        "location also works for a snapshot that the catalog does not list), or discard the state with "
        "start_from=empty and discard_state."
    )


def _not_undone(facts: RecoveryFacts) -> str:
    before = facts.before_the_edit
    if not before:
        return ""
    names = ", ".join(describe_snapshot(snapshot) for snapshot in before[:8])
    return f"Snapshots without the last edit of the state are not used, because that would undo it: {names}. "


def _skipped_points(facts: RecoveryFacts, chosen: SnapshotRecord) -> str:
    if not facts.prefer_checkpoint or chosen not in facts.snapshots:
        return ""
    distance = skipped_distance(facts.snapshots, chosen)
    if distance is None:
        return ""
    return (
        f" (prefer_checkpoint_for_recovery skips {describe_snapshot(facts.snapshots[0])}: {distance} further back, "
        "and later rows are written again)"
    )


def _asked_for(facts: RecoveryFacts) -> SnapshotRecord:
    point = facts.start_from.point
    if point is StartPoint.LATEST_CHECKPOINT:
        return _first(facts, [i for i in facts.snapshots if i.kind is SnapshotKind.CHECKPOINT], "checkpoint")
    if point is StartPoint.LATEST_SAVEPOINT:
        return _first(facts, [i for i in facts.snapshots if i.kind is SnapshotKind.SAVEPOINT], "savepoint")
    if point is StartPoint.PREFERRED_SAVEPOINT:
        preferred = facts.stream.preferred_savepoint_id
        return _first(facts, [i for i in facts.all_snapshots if i.snapshot_id == preferred], "preferred savepoint")
    reference = facts.start_from.reference or ""
    found = named(facts.all_snapshots, reference)
    return _first(facts, [found] if found is not None else [], f"snapshot named {reference!r}")


def _first(facts: RecoveryFacts, snapshots: Sequence[SnapshotRecord], what: str) -> SnapshotRecord:
    if snapshots:
        return snapshots[0]
    known = ", ".join(describe_snapshot(snapshot) for snapshot in facts.all_snapshots[:8]) or "none"
    raise SnapshotNotFoundError(
        f"Stream {facts.stream.stream_id!r} has no {what}. Snapshots it can start from: {known}. "
        "Choose one of them, or start_from=latest."
    )


_SHOWN = 12


def _refuse_unregistered_state(facts: RecoveryFacts) -> None:
    names_a_snapshot = facts.start_from.point is StartPoint.NAMED
    found = [*facts.unknown.directories, *(() if names_a_snapshot else facts.unknown.snapshots)]
    if not found or facts.snapshots:
        return
    raise LiveDirectoryError(
        f"The catalog has no execution of stream {facts.stream.stream_id!r}, but its folders contain state: the "
        "catalog was lost, its URL is wrong, or another environment uses the same folders. Nothing was changed. "
        "Found:\n"
        f"{_all_that_is_there(facts)}\n"
        "Use the right catalog, restore it from a backup, or register this state with rebuild_catalog_job or "
        "dagster-ckpt rebuild. Give a second environment its own folders. To start from one of these snapshots by its "
        "location, first move the live directories away. To discard all of this, start with start_from=empty and "
        "discard_state."
    )


def _refuse_unconfirmed_discard(facts: RecoveryFacts) -> None:
    if facts.start_from.discard_state:
        return
    to_discard = []
    batch = facts.live_batch
    is_broken = facts.live is not None and facts.live.status is LiveStatus.BROKEN
    if batch is not None or is_broken:
        known = "" if batch is None else f", after batch {batch}"
        to_discard.append(f"the live directory {facts.stream.live_directory}{known}")
    to_discard += [describe_snapshot(snapshot) for snapshot in facts.snapshots]
    origin = facts.stream.origin
    if not to_discard and origin is not None and origin.kind is not OriginKind.EMPTY:
        to_discard.append(
            f"the state from which {facts.stream.live_directory} was created: {origin.location or origin.kind}"
        )
    is_unknown = bool(facts.unknown.directories or facts.unknown.snapshots)
    if not to_discard and not is_unknown:
        return
    raise StateAtRiskError(
        f"Stream {facts.stream.stream_id!r} is not started empty, nothing was changed: that start would discard all "
        "its state and roll file sinks back to before their first batch. Later recoveries could not return to:\n"
        f"{(_listed(to_discard) if to_discard else _all_that_is_there(facts))}\n"
        "To discard it, confirm with discard_state=true. To continue instead, start from latest or from one of these."
    )


def _all_that_is_there(facts: RecoveryFacts) -> str:
    found = [facts.unknown.directories, facts.unknown.snapshots, facts.unknown.sinks]
    return "\n".join(_listed(each) for each in found if each)


def _listed(things: Sequence[str]) -> str:
    more = [f"- and {len(things) - _SHOWN} more"] if len(things) > _SHOWN else []
    return "\n".join([*(f"- {each}" for each in things[:_SHOWN]), *more])
