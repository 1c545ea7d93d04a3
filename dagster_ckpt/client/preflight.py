"""Finds out what a start would do. Nothing is changed, and the query may be running."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from dagster_ckpt.catalog.desired_states import PreflightRecord
from dagster_ckpt.catalog.journal import PointFailure
from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.client.requests import is_running
from dagster_ckpt.config.state_backend import OnStateChange
from dagster_ckpt.errors import (
    CkptError,
    InputGoneError,
    LiveDirectoryError,
    RequestFailedError,
    RowsAtRiskError,
    StorageAccessError,
)
from dagster_ckpt.recovery.examination import Examiner, is_suspicious
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.live_directories import restore_into, scratch_directory, snapshot_location
from dagster_ckpt.recovery.operator_compatibility import describe_differences
from dagster_ckpt.recovery.plan import RecoveryFacts, RecoveryPlan, Restore, RestoreAndReplay, Rewind, StartEmpty
from dagster_ckpt.recovery.planning import plan_recovery, with_newer_point
from dagster_ckpt.recovery.query_plan_check import PlanChange, check_state, plan_change
from dagster_ckpt.recovery.replay import lost_batches
from dagster_ckpt.recovery.rewind_preview import (
    RewindPreview,
    describe_safety_savepoint,
    keeping,
    preview_rewind,
    refuse_loss,
    why_kept,
)
from dagster_ckpt.recovery.sink_survey import refuse_shared_folder
from dagster_ckpt.recovery.source_change import refuse_changed_sources
from dagster_ckpt.recovery.source_check import refuse_gone_records
from dagster_ckpt.recovery.source_mapping import plan_of_start
from dagster_ckpt.recovery.state_migration import (
    PlannedMigration,
    refuse_two_rewrites,
    state_migration,
)
from dagster_ckpt.recovery.undone_reads import downstream_readers, with_undone_reads
from dagster_ckpt.spark.checkpoint_dir.layout import STATE, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import clone
from dagster_ckpt.spark.query.description import is_described_query, session_of
from dagster_ckpt.spark.query.output import NamedOutput, named_output
from dagster_ckpt.spark.query.plan import plan_of_writer
from dagster_ckpt.spark.query.sources import source_identities
from dagster_ckpt.spark.query.trial_batch import Trial, copy_for_trial, describe_trial_error, run_trial
from dagster_ckpt.state.diff import StateDifference, differences, paired
from dagster_ckpt.state.rewriter import readers_of
from dagster_ckpt.state.rewriting import rewrite_state
from dagster_ckpt.state.stopped_state import StateShape
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.ownership import refuse_unclaimed
from dagster_ckpt.stream.snapshots import describe_snapshot, holding
from dagster_ckpt.stream.start_from import StartFrom

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_T = TypeVar("_T")


def planned_start(stream: StreamHandle, start_from: StartFrom) -> RecoveryPlan:
    """Plan a start as far as catalog and storage allow. No sink is asked."""
    return plan_recovery(start_facts(stream, start_from))


def start_facts(stream: StreamHandle, start_from: StartFrom, output: NamedOutput | None = None) -> RecoveryFacts:
    facts = recovery_facts(stream, start_from, predecessor_ended=True, remembers=False, output=output)
    return with_undone_reads(stream.catalog, facts)


def start_preview(stream: StreamHandle, start_from: StartFrom, known: RewindPreview | None = None) -> RewindPreview:
    """Preview a start; returns `known` if the start would still continue from the same point."""
    if known is not None and _still_holds(known.plan, planned_start(stream, start_from)):
        return known
    facts = start_facts(stream, start_from)
    while True:
        plan = plan_recovery(facts)
        try:
            with holding(stream.catalog, [plan.snapshot], "preview"):
                ahead = ahead_of(stream, facts, plan)
                if (why := why_kept(facts, plan, ahead)) is not None:
                    facts = keeping(facts, why)
                    continue
                newer = with_newer_point(facts, plan, ahead.gone) if ahead.gone and not start_from.accept_loss else None
                if newer is not None:
                    facts = newer
                    continue
                of, accepted = stream.stream_id, start_from.accept_undone
                readers = downstream_readers(stream.catalog, of, ahead.plan, accepted) if ahead.undoes else ()
                state = tuple(_check_rewrite(stream, ahead.plan, start_from))
                safety = describe_safety_savepoint(facts, ahead.plan, migrates=start_from.changes_state)
                return replace(ahead, state=state, safety_savepoint=safety, readers=readers)
        except CkptError as error:
            if plan.point is None or not start_from.chooses_its_point or not is_suspicious(error):
                raise
            damage = Examiner(stream).damage_of_point(plan)
            if damage is None:
                raise
            # The start will skip this point, too.
            failed = PointFailure(0, "preview", plan.point, damage.error, damage.detail, True, plan.to_batch, 0)
            facts = replace(facts, failures=[*facts.failures, failed])


def _still_holds(known: RecoveryPlan, now: RecoveryPlan) -> bool:
    """Whether two plans continue from the same point, even if the query has run on."""
    before, after = known.as_record(), now.as_record()
    is_same = all(before.get(name) == after.get(name) for name in ("snapshot_id", "new_query_id", "claims"))
    if not is_same or before.get("source_offsets") != after.get("source_offsets"):
        return False
    if isinstance(now, Rewind):
        return isinstance(known, Rewind) and known.to_batch == now.to_batch
    return known.kind is now.kind or (isinstance(known, RestoreAndReplay) and isinstance(now, Restore))


def listed_snapshot(stream: StreamHandle, snapshot: SnapshotRecord | None) -> SnapshotRecord | None:
    if snapshot is None:
        return None
    listed = stream.catalog.snapshots.by_id([snapshot.snapshot_id]).get(snapshot.snapshot_id)
    return listed if listed is not None and listed.location == snapshot.location else None


def ahead_of(
    stream: StreamHandle,
    facts: RecoveryFacts,
    plan: RecoveryPlan,
    output: NamedOutput | None = None,
    session: SparkSession | None = None,
) -> RewindPreview:
    """Preview what a start would undo and process again."""
    lost, running = lost_batches(stream, facts, plan, output), is_running(stream)
    replayed = plan if lost is None else lost.plan()
    ahead = preview_rewind(stream, facts, replayed, output, session, is_running=running)
    if lost is not None and ahead.gone:
        # Like the start, do not replay if sources no longer have the input.
        ahead = preview_rewind(stream, facts, plan, output, session, is_running=running)
    return ahead


def _check_rewrite(stream: StreamHandle, plan: RecoveryPlan, start_from: StartFrom) -> Sequence[str]:
    """Check a rewrite before a query is suspended for it."""
    if start_from.changes_state:
        # Only the code says which operators change.
        done = "is built from all input that was read so far" if start_from.bootstrap_state else "is migrated"
        return (f"the state {done} if the code differs; dagster-ckpt check lists what becomes of each operator",)
    if start_from.state_partitions is not None:
        return check_state(stream, plan, start_from).messages
    if stream.on_backend_change is OnStateChange.CONVERT:
        # A start recovers from a live directory that cannot be read.
        with suppress(LiveDirectoryError):
            return check_state(stream, plan, start_from).messages
    return ()


@dataclass(frozen=True)
class StartCheck:
    """A start that sinks, sources and stored state do not refuse.

    Attributes:
        change: How the query's plan differs from that of the state, as far as known; None for a migration.
    """

    plan: RecoveryPlan
    rewrite: StateShape | None
    change: PlanChange | None
    migration: PlannedMigration | None = None


def _facts_without(facts: RecoveryFacts, plan: RecoveryPlan, error: CkptError) -> RecoveryFacts:
    """Return facts for another point, as the start does; raise the error without one."""
    newer = with_newer_point(facts, plan, error.gone) if isinstance(error, InputGoneError) else None
    if newer is not None:
        return newer
    if not facts.undone.went_back or isinstance(error, StorageAccessError):
        raise error
    return keeping(facts, str(error))


def check_start(
    stream: StreamHandle,
    describe: Callable[[], DataStreamWriter],
    start_from: StartFrom,
    *,
    report: Callable[[str], None],
) -> StartCheck:
    """Raise what the start would raise; `report` gets a message per change.

    A query that cannot be described refuses nothing here; its start reports that.
    """
    record = stream.catalog.streams.get(stream.stream_id)
    output = _ask_query(describe, named_output)
    facts = start_facts(stream, start_from, output)
    while True:
        plan = plan_of_start(stream, facts, describe)
        with holding(stream.catalog, [plan.snapshot], "check of a start"):
            try:
                refuse_unclaimed(stream, plan.snapshot)
                changed = refuse_changed_sources(stream, plan, _ask_query(describe, source_identities))
                ahead = ahead_of(stream, facts, plan, output, _ask_query(describe, _session))
                if (why := why_kept(facts, plan, ahead)) is not None:
                    raise RowsAtRiskError(why)
                refuse_loss(stream, ahead, accept_loss=start_from.accept_loss)
                gone = refuse_gone_records(stream, plan, describe, accept_loss=start_from.accept_loss)
            except CkptError as error:
                facts = _facts_without(facts, plan, error)
                continue
            for message in changed:
                report(message)
            for message in gone:
                report(f"accepted without these records: {message}")
            checked = check_state(stream, plan, start_from)
            for message in checked.messages:
                report(message)
            new = _ask_query(describe, plan_of_writer)
            migration = state_migration(record, plan, new, start_from, describe, rules=stream.state_migrations)
            if migration is not None:
                refuse_two_rewrites(stream.stream_id, checked.rewrite)
                migration.check_input(record, plan)
                for message in migration.messages():
                    report(message)
            change = plan_change(record, plan, new) if migration is None else None
            for difference in change.differences if change is not None else ():
                report(f"the plan differs: {difference}")
            refuse_shared_folder(stream, output)
            return StartCheck(plan, checked.rewrite, change, migration)


def _ask_query(describe: Callable[[], DataStreamWriter], ask: Callable[[DataStreamWriter], _T]) -> _T | None:
    try:
        return ask(describe())
    except Exception:  # noqa: BLE001 - the start fails in the same way and reports it
        return None


def _session(writer: DataStreamWriter) -> SparkSession | None:
    return session_of(writer) if is_described_query(writer) else None


TRIAL_TIMEOUT_S = 900.0


def preflight(
    stream: StreamHandle,
    describe: Callable[[], DataStreamWriter],
    *,
    start_from: StartFrom | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    report: Callable[[str], None] = lambda _message: None,
) -> PreflightRecord:
    """Try whether the loaded code can resume, and record the result.

    On a copy of the state, rewritten or migrated as `start_from` says, the newest committed batch is replayed; if that
    is not retained any more, a batch of new data, if there is any. `interrupted` is polled, and ends it with an error.
    """
    stream.catalog.streams.get(stream.stream_id)
    change: PlanChange | None = None
    try:
        checked = check_start(stream, describe, start_from or StartFrom(), report=report)
        change = checked.change
        trial, how = _try(
            stream,
            checked,
            describe,
            interrupted=interrupted,
            report=report,
        )
    except StorageAccessError:
        raise
    except CkptError as error:
        trial, how = Trial(None, str(error)), ""
    if interrupted():
        raise RequestFailedError(f"The preflight of stream {stream.stream_id!r} was interrupted, so it has no result.")
    reason = how if trial.error is None else describe_trial_error(trial.error)
    refused = None if change is None or change.is_accepted else change
    if refused is not None:
        changes = describe_differences(refused.differences)
        reason = f"the state of the new code differs from the existing state. {changes} Spark: {reason}"
    at_ms = stream.catalog.now_ms()
    passed = trial.error is None and refused is None
    fingerprint = refused.fingerprint if refused is not None else None
    result = PreflightRecord(stream.code_version, passed, reason, trial.batch_id, at_ms, fingerprint)
    stream.catalog.desired_states.note_preflight(stream.stream_id, result)
    return result


def _try(
    stream: StreamHandle,
    checked: StartCheck,
    describe: Callable[[], DataStreamWriter],
    *,
    interrupted: Callable[[], bool],
    report: Callable[[str], None],
) -> tuple[Trial, str]:
    plan = checked.plan

    def run(scratch: LiveDirectory, *, replays: bool) -> tuple[Trial, list[str]]:
        name = f"{stream.name} preflight"
        with _rewritten(describe, scratch, checked, interrupted, report) as tried:
            trial = run_trial(
                describe, tried, name, replays=replays, timeout_s=TRIAL_TIMEOUT_S, interrupted=interrupted
            )
            if not replays or trial.error is not None or trial.batch_id is None:
                return trial, []
            return trial, compare_trial(stream, lambda: session_of(describe()), live, tried, trial.batch_id)

    if isinstance(plan, StartEmpty) or (plan.snapshot is None and plan.to_batch is None and _is_empty(stream)):
        return Trial(None), "there is no state yet, so every version can start"
    live = LiveDirectory(plan.directory or stream.catalog.streams.get(stream.stream_id).live_directory or "")
    if plan.snapshot is None:
        with scratch_directory(stream) as scratch:
            if copy_for_trial(live, scratch, before_last_batch=True):
                report("the newest committed batch is replayed on a copy of the live directory, without output")
                trial, compared = run(scratch, replays=True)
                if not trial.data_is_gone:
                    return trial, "; ".join([f"batch {trial.batch_id} was replayed on a copy of the state", *compared])
                report(f"the input of that batch is no longer available, so new input is tried: {trial.error}")
    with scratch_directory(stream) as scratch, holding(stream.catalog, [plan.snapshot], "preflight"):
        if plan.snapshot is not None:
            report(f"the live directory is lost, so {describe_snapshot(plan.snapshot)} is tried")
            restore_into(
                stream, snapshot_location(plan.snapshot), scratch, new_query_id=str(uuid.uuid4()), is_scratch=True
            )
        else:
            copy_for_trial(live, scratch, before_last_batch=False)
        trial, _ = run(scratch, replays=False)
        ran = f"batch {trial.batch_id} was run on a copy of the state"
        return (
            trial,
            ran if trial.batch_id is not None else "it starts, but there was no input, so the state was not loaded",
        )


def _is_empty(stream: StreamHandle) -> bool:
    record = stream.catalog.streams.get(stream.stream_id)
    return record.live_directory is None or LiveDirectory(record.live_directory).positions().commit is None


@contextmanager
def _rewritten(
    describe: Callable[[], DataStreamWriter],
    scratch: LiveDirectory,
    checked: StartCheck,
    interrupted: Callable[[], bool],
    report: Callable[[str], None],
) -> Iterator[LiveDirectory]:
    rewrite, migration = checked.rewrite, checked.migration
    if rewrite is None and migration is None:
        yield scratch
        return

    def watch() -> None:
        if interrupted():
            raise RequestFailedError("The preflight was interrupted while it rewrote the state.")

    rewritten, place = scratch.sibling(".rewritten"), scratch.sibling(".made")
    try:
        with nullcontext() if migration is None else migration.graft(scratch, place, watch, report) as graft:
            made = rewrite_state(
                session_of(describe()), scratch, rewritten, shape=rewrite, graft=graft, watch=watch, report=report
            )
        report(f"{made}, in a copy")
        yield rewritten
    finally:
        rewritten.delete()


# A comparison reads the whole state twice.
MOST_ROWS = 1_000_000


def compare_trial(
    stream: StreamHandle, session: Callable[[], SparkSession], live: LiveDirectory, tried: LiveDirectory, batch_id: int
) -> list[str]:
    """Compare the state after a batch of new code (`tried`) with that of the running code (`live`).

    What cannot be compared is only reported.
    """
    if not tried.folder.list(STATE):
        return []
    newest = stream.catalog.snapshots.newest_checkpoint(stream.stream_id)
    rows = newest.state_rows if newest is not None else None
    if rows is not None and rows > MOST_ROWS:
        return [f"the state of {rows:,} rows is not compared with that of the running code: more than {MOST_ROWS:,}"]
    try:
        with scratch_directory(stream) as copy:
            clone(live, copy, at_batch=batch_id, is_scratch=True)
            spark = session()
            with readers_of(spark, copy, [batch_id]) as olds, readers_of(spark, tried, [batch_id]) as news:
                before, after = olds[batch_id], news[batch_id]
                return _messages(batch_id, differences(before, after, paired(before.states, after.states)))
    except CkptError as error:
        return [f"the state after batch {batch_id} was not compared with that of the running code: {error}"]


def _messages(batch_id: int, found: list[StateDifference]) -> list[str]:
    changed = [state for state in found if not state.is_empty]
    if not changed:
        return [f"after batch {batch_id} the new code has the same state as the running code"]
    messages = []
    for state in changed:
        counts = ", ".join(f"{number} rows {change.lower()}" for change, number in state.counts.items() if number)
        note = f" ({state.note})" if state.note is not None else ""
        messages.append(
            f"after batch {batch_id} the new code has different state than the running code: "
            f"{state.name}: {counts}{note}"
        )
    return messages
