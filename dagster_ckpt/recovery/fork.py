"""Forking: another stream continues from this one's state as an independent query. The original may be running.

A crash is harmless: the directory is built under a temporary name, and one transaction assigns it and its output to the
new stream. What its first start must check stays recorded until that has succeeded.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dagster_ckpt.catalog.pending_restore import Forked
from dagster_ckpt.catalog.records import Holder, OriginKind, StateOrigin
from dagster_ckpt.errors import InputGoneError, NothingCommittedError, OptionError, RequestFailedError, SharedSinkError
from dagster_ckpt.io.location import same_folder
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.live_directories import restore_into, snapshot_location
from dagster_ckpt.recovery.plan import FinishRestore, RecoveryFacts, RecoveryPlan, Rewind
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.sink_survey import refuse_copies
from dagster_ckpt.recovery.source_inputs import InputStatus, reasons, source_inputs
from dagster_ckpt.sinks.file_sink import FileSink, fork_output
from dagster_ckpt.sinks.file_sink_log import own_past
from dagster_ckpt.sinks.registry import logs_in_snapshot, sinks_of
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry, StillMine
from dagster_ckpt.spark.checkpoint_dir.inspect import state_edits
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import clone, give_query_id
from dagster_ckpt.spark.query.session import active_session
from dagster_ckpt.stream.fencing import fence_predecessor
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper, acquire
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.ownership import check_places, claim_live_folder, refuse_unfinished_adoption
from dagster_ckpt.stream.snapshots import describe_snapshot, holding
from dagster_ckpt.stream.start_from import StartFrom, StartPoint
from dagster_ckpt.values.durations import monotonic_ms


@dataclass(frozen=True)
class Fork:
    """A stream forked from another one, perhaps of another deployment (`import_snapshot`).

    `outputs` maps folders of the original's file sinks to those that received their rows. The fork must not write to
    `parent_outputs`.
    """

    stream_id: str
    of_stream_id: str
    source: str
    batch_id: int
    query_id: str
    live_directory: str
    outputs: Mapping[str, str] = field(default_factory=dict)
    parent_outputs: tuple[str, ...] = ()
    of_deployment: str | None = None


def fork(
    original: StreamHandle,
    stream: StreamHandle,
    start_from: StartFrom,
    *,
    origin: str,
    outputs: Mapping[str, str] | None = None,
    replace_state: bool = False,
) -> Fork:
    """Fork another stream's state into a stream that is not running; its next start, from `latest`, continues there.

    Args:
        start_from: `latest` (the newest committed batch), `batch-<n>`, or a snapshot.
        outputs: Folders of the original's file sinks, mapped to folders of the fork that receive its rows up to the
            fork. Others contain only what comes after.
    """
    if original.stream_id == stream.stream_id:
        raise OptionError(f"Stream {stream.stream_id!r} cannot be forked into itself. Name another one, or rewind it.")
    facts = recovery_facts(original, start_from, predecessor_ended=True)
    plan = _plan(original, facts)

    def check() -> None:
        with holding(original.catalog, [plan.snapshot], f"fork into {stream.stream_id}"):
            _refuse_gone_inputs(original, stream, facts, plan)

    def build(target: LiveDirectory, still_mine: StillMine) -> ForkedState:
        with holding(original.catalog, [plan.snapshot], f"fork into {stream.stream_id}"):
            return _make(original, plan, target, dict(outputs or {}), still_mine)

    holder = this_holder(f"fork-{uuid.uuid4()}", origin, None)
    made = assign_state(
        stream, build, holder=holder, replace_state=replace_state, plan=_state_plan(original, plan), check=check
    )
    source = (
        describe_snapshot(plan.snapshot)
        if plan.snapshot is not None
        else f"its live directory at batch {made.pending.batch_id}"
    )
    return Fork(
        stream.stream_id,
        original.stream_id,
        source,
        made.pending.batch_id,
        made.query_id,
        made.live_directory,
        dict(outputs or {}),
        made.pending.parent_outputs,
    )


@dataclass(frozen=True)
class ForkedState:
    """Another stream's state in a prepared live directory, and what its first start must check."""

    live_directory: str
    query_id: str
    pending: Forked


def assign_state(
    stream: StreamHandle,
    build: Callable[[LiveDirectory, StillMine], ForkedState],
    *,
    holder: Holder,
    replace_state: bool,
    plan: Mapping[str, Any],
    check: Callable[[], None] = lambda: None,
) -> ForkedState:
    """Let the next start of a stream that is not running continue from another stream's state.

    `plan` is that of the state. `check` is called under the lease before anything is written.
    """
    above = stream.token_in_use(stream.register())
    acquired = acquire(stream.catalog, stream.stream_id, holder, above=above)
    with LeaseKeeper(stream.catalog, acquired.record) as lease:
        record = stream.catalog.streams.get(stream.stream_id)
        refuse_unfinished_adoption(record)
        committed = stream.catalog.executions.last_batch(stream.stream_id, record.live_directory)
        if committed is not None and not replace_state:
            raise RequestFailedError(
                f"Stream {stream.stream_id!r} has already committed batches, up to {committed}. Continuing from "
                "another state discards them: confirm with replace_state, or name another stream."
            )
        check_places(stream, None, predecessor_ended=acquired.predecessor_ended)
        check()
        # While the catalog still has the directory in which a lost holder's query runs.
        fence_predecessor(stream, acquired, still_mine=lease.check)
        started_ms = monotonic_ms()
        claim_live_folder(stream)
        made = build(stream.new_live_directory(record.live_generation, lease.record.token), lease.step)
        stream.catalog.streams.switch_live_directory(
            lease.record,
            made.live_directory,
            origin=StateOrigin(OriginKind.FORK, batch_id=made.pending.batch_id),
            pending_restore=made.pending,
            plan=plan,
            state_edits=state_edits(LiveDirectory(made.live_directory)),
            duration_ms=monotonic_ms() - started_ms,
        )
    return made


def _plan(original: StreamHandle, facts: RecoveryFacts) -> RecoveryPlan:
    if facts.start_from.point is StartPoint.EMPTY:
        raise OptionError(
            "A fork continues from existing state: set start_from to latest, batch-<n> or a snapshot, not to empty."
        )
    plan = plan_recovery(facts)
    if isinstance(plan, FinishRestore):
        raise RequestFailedError(
            f"Stream {original.stream_id!r} has an unfinished restore: start it first, or name a snapshot to fork from."
        )
    if plan.to_batch is None:
        raise NothingCommittedError(
            f"Stream {original.stream_id!r} has not committed a batch to continue from: {plan.reason}."
        )
    return plan


def _refuse_gone_inputs(original: StreamHandle, stream: StreamHandle, facts: RecoveryFacts, plan: RecoveryPlan) -> None:
    inputs = source_inputs(original, facts, plan, active_session())
    lacking = " ".join(reasons(inputs, status) for status in (InputStatus.GONE, InputStatus.REPEATED)).strip()
    if lacking and not facts.start_from.accept_loss:
        raise InputGoneError(
            f"Stream {original.stream_id!r} is not forked into {stream.stream_id!r} after batch {plan.to_batch}, "
            f"nothing was changed: the fork would read again what the original has read since, and would lack rows or "
            f"have some twice. {lacking} Put back the files that are read again, with their modification times and no "
            "others, or fork from a newer snapshot. To fork nevertheless, set accept_loss.",
            lacking,
        )


def _state_plan(original: StreamHandle, plan: RecoveryPlan) -> Mapping[str, Any]:
    return (
        plan.snapshot.plan if plan.snapshot is not None else original.catalog.streams.get(original.stream_id).plan or {}
    )


def _make(
    original: StreamHandle,
    plan: RecoveryPlan,
    target: LiveDirectory,
    outputs: Mapping[str, str],
    still_mine: StillMine,
) -> ForkedState:
    query_id = str(uuid.uuid4())
    if plan.snapshot is not None:
        restore_into(original, snapshot_location(plan.snapshot), target, new_query_id=query_id, marked=True)
        batch_id = int(plan.to_batch or 0)
        logs = _logs_of_snapshot(original, snapshot_location(plan.snapshot))
    else:
        live = LiveDirectory(plan.directory or original.catalog.streams.get(original.stream_id).live_directory or "")
        at_batch = plan.to_batch if isinstance(plan, Rewind) else None
        batch_id = clone(live, target, at_batch=at_batch, marked=True).batch_id
        give_query_id(target, query_id)
        logs = _logs_of_sinks(original.catalog.executions.last_sinks(original.stream_id), batch_id)
    give_outputs(logs, outputs, batch_id, still_mine)
    pending = Forked(
        of_stream_id=original.stream_id,
        batch_id=batch_id,
        parent_outputs=tuple(logs),
        outputs=tuple(outputs.values()),
        snapshot_id=plan.snapshot.snapshot_id if plan.snapshot is not None else None,
    )
    return ForkedState(target.url, query_id, pending)


def give_outputs(
    logs: Mapping[str, Sequence[SinkEntry]],
    outputs: Mapping[str, str],
    batch_id: int,
    still_mine: StillMine,
    *,
    may_link: bool = True,
) -> None:
    """Copy rows of another stream's folders up to a batch. May be repeated.

    With `may_link`, files on the same disk are hard-linked.
    """
    chosen: list[tuple[str, str]] = []
    for old, new in outputs.items():
        path = next((path for path in logs if same_folder(path, old)), None)
        if path is None:
            raise SharedSinkError(
                f"No file sink of the original writes to {old}; its file sinks write to: {', '.join(logs) or 'none'}. "
                "Name one of these folders."
            )
        chosen.append((path, new))
    refuse_copies(logs, chosen, batch_id)
    for old, new in chosen:
        fork_output(old, new, batch_id, logs[old], still_mine=still_mine, may_link=may_link)


def _logs_of_sinks(sinks: Sequence[str], batch_id: int) -> dict[str, list[SinkEntry]]:
    return {folder: own_past(folder, batch_id) for folder in _folders(sinks)}


def _logs_of_snapshot(stream: StreamHandle, location: str) -> dict[str, list[SinkEntry]]:
    logs = logs_in_snapshot(stream.store, location)
    # The fork may not write to the original's current folders either.
    current = _folders(stream.catalog.executions.last_sinks(stream.stream_id))
    return logs | {path: [] for path in current if path not in logs}


def _folders(sinks: Sequence[str]) -> list[str]:
    return [sink.folder for sink in sinks_of(sinks) if isinstance(sink, FileSink)]
