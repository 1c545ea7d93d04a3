"""Compares the query to start with the one that wrote the state: their plans and state backends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import NoReturn

from dagster_ckpt.catalog.records import LeaseRecord, StreamRecord
from dagster_ckpt.config.state_backend import PinnedState, backend_change
from dagster_ckpt.errors import PlanChangedError, StateBackendChangeError
from dagster_ckpt.recovery.plan import RecoveryKind, RecoveryPlan
from dagster_ckpt.spark.checkpoint_dir.inspect import check_pinned_provider, pinned_state
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.plan_description import Pair, PlanDescription, PlanOperator, read_plan
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import describe_snapshot

_NAMES = {
    "Aggregate": "aggregation",
    "Deduplicate": "dropDuplicates",
    "DeduplicateWithinWatermark": "dropDuplicatesWithinWatermark",
    "Distinct": "distinct",
    "EventTimeWatermark": "watermark",
    "FlatMapGroupsInPandasWithState": "applyInPandasWithState",
    "FlatMapGroupsWithState": "flatMapGroupsWithState",
    "GlobalLimit": "limit",
    "Join": "stream-stream join",
    "TransformWithState": "transformWithState",
    "TransformWithStateInPySpark": "transformWithStateInPandas",
}
_NOTHING = "nothing"


def plan_differences(before: PlanDescription, after: PlanDescription) -> tuple[str, ...]:
    """Differences between two plans that affect the state, one line each.

    Args:
        before: The plan that wrote the state.
        after: The plan that would continue from it.

    Returns:
        Empty if the state means the same to both.
    """
    if before.as_record() == after.as_record():
        return ()
    return tuple(_differences(before, after))


def refuse_plan_change(stream_id: str, differences: Sequence[str], *, came_from: str, fingerprint: str) -> NoReturn:
    """Refuse a start whose code interprets the state differently from the code that wrote it.

    Args:
        stream_id: The stream.
        differences: The differences.
        came_from: Description of the state that the start would continue from.
        fingerprint: Fingerprint of the new code's plan.

    Raises:
        PlanChangedError: Always.
    """
    raise PlanChangedError(
        f"Stream {stream_id!r} is not started, nothing was changed: the code would continue from {came_from} with a "
        f"plan that differs from the one that wrote this state. {describe_differences(differences)} Spark compares "
        "types only, so it may mix the old state with the new. If the change is intended, start with "
        f"accept_plan_change; from a program: client.accept_plan_change({stream_id!r}, {fingerprint!r}). Otherwise "
        "restore the previous query, or start without state: start_from=empty, or a new stream."
    )


def describe_differences(differences: Sequence[str]) -> str:
    """Differences as one string."""
    return "Differences: " + "; ".join(differences) + "."


def _differences(before: PlanDescription, after: PlanDescription) -> Iterator[str]:
    old, new = before.operators, after.operators
    kinds = SequenceMatcher(None, [each.kind for each in old], [each.kind for each in new], autojunk=False)
    for step, old_from, old_to, new_from, new_to in kinds.get_opcodes():
        if step == "equal":
            for index, one in enumerate(old[old_from:old_to]):
                yield from _in_operator(one, new[new_from + index], old_from + index + 1)
            continue
        for index in range(old_from, old_to):
            yield f"operator {index + 1}, {_described(old[index])}, was removed"
        for index in range(new_from, new_to):
            yield f"operator {index + 1}, {_described(new[index])}, was added"
    if before.output_mode != after.output_mode and None not in (before.output_mode, after.output_mode):
        yield f"output mode: {before.output_mode} -> {after.output_mode}"


def _in_operator(old: PlanOperator, new: PlanOperator, number: int) -> Iterator[str]:
    where = f"operator {number} ({_name(old)})"
    yield from _by_place(f"{where}, key", old.keys, new.keys)
    yield from _by_place(f"{where}, value", old.values, new.values)
    yield from _by_name(where, old.settings, new.settings)
    yield from _by_name(f"{where}, computed column", old.definitions, new.definitions)


def _by_place(where: str, old: Sequence[Pair], new: Sequence[Pair]) -> Iterator[str]:
    """Compare keys and values, which Spark finds by position, not by name."""
    for index in range(max(len(old), len(new))):
        was = " ".join(old[index]) if index < len(old) else _NOTHING
        now = " ".join(new[index]) if index < len(new) else _NOTHING
        if was != now:
            yield f"{where} {index + 1}: {was} -> {now}"


def _by_name(where: str, old: Sequence[Pair], new: Sequence[Pair]) -> Iterator[str]:
    names = dict.fromkeys(name for name, _ in (*old, *new))
    for name in names:
        was = ", ".join(text for each, text in old if each == name) or _NOTHING
        now = ", ".join(text for each, text in new if each == name) or _NOTHING
        if was != now:
            yield f"{where} {name}: {was} -> {now}"


def _name(operator: PlanOperator) -> str:
    return _NAMES.get(operator.kind, operator.kind)


def _described(operator: PlanOperator) -> str:
    keys = ", ".join(name for name, _ in operator.keys)
    return f"{_name(operator)} by {keys}" if keys else _name(operator)


def check_backend(stream: StreamHandle, plan: RecoveryPlan) -> Sequence[str]:
    """Compare the stream's state backend with the state that the plan starts from, before anything is changed.

    Args:
        stream: The stream; without a backend nothing is checked.
        plan: The recovery to carry out.

    Returns:
        Settings that Spark keeps from the query's first start, one message each for the run's log.

    Raises:
        StateBackendChangeError: The backend cannot read the state.
        LiveDirectoryError: The file that records the backend is damaged.
    """
    if stream.backend is None:
        return ()
    change = backend_change(_pinned(stream, plan), stream.backend)
    if change.refused is not None:
        _check_log(stream, plan)
        raise StateBackendChangeError(f"Stream {stream.stream_id!r} cannot be started. {change.refused}")
    return change.kept


def _pinned(stream: StreamHandle, plan: RecoveryPlan) -> PinnedState:
    if plan.kind is RecoveryKind.START_EMPTY:
        return PinnedState(None)
    if plan.kind is RecoveryKind.RESTORE and plan.snapshot is not None and plan.snapshot.location is not None:
        provider = stream.store.manifest(plan.snapshot.location).header.properties.get("state_store_provider")
        return PinnedState(provider if isinstance(provider, str) else None)
    live = stream.catalog.streams.get(stream.stream_id).live_directory
    return PinnedState(None) if live is None else pinned_state(LiveDirectory(live))


def _check_log(stream: StreamHandle, plan: RecoveryPlan) -> None:
    # A damaged name is not a change of the backend: a recovery goes back to the next point, while a
    # change is refused.
    live = stream.catalog.streams.get(stream.stream_id).live_directory
    if plan.kind is not RecoveryKind.RESTORE and live is not None:
        check_pinned_provider(LiveDirectory(live))


@dataclass(frozen=True)
class PlanChange:
    """How a plan differs from the one that wrote a state.

    Attributes:
        differences: The differences, one line each.
        came_from: Description of the state, for messages.
        fingerprint: Fingerprint of the new plan.
        is_accepted: Whether a user has already accepted exactly this plan.
    """

    differences: tuple[str, ...]
    came_from: str
    fingerprint: str
    is_accepted: bool


def plan_change(record: StreamRecord, recovery: RecoveryPlan, new: PlanDescription | None) -> PlanChange | None:
    """Compare the plan of a query to start with that of the state it would continue from.

    Args:
        record: The stream.
        recovery: Where it would start.
        new: The plan of the query; None if unknown.

    Returns:
        None if the state means the same to both, if there is no state, or if one of the plans is
        unknown.
    """
    snapshot = recovery.snapshot if recovery.kind is RecoveryKind.RESTORE else None
    came_from = describe_snapshot(snapshot) if snapshot is not None else "its live directory"
    is_empty = recovery.kind is RecoveryKind.START_EMPTY
    old = None if is_empty else read_plan(snapshot.plan if snapshot is not None else record.plan)
    differences = plan_differences(old, new) if old is not None and new is not None else ()
    if new is None or not differences:
        return None
    return PlanChange(differences, came_from, new.fingerprint, record.accepted_plan == new.fingerprint)


def check_plan(
    stream: StreamHandle, recovery: RecoveryPlan, new: PlanDescription | None, lease: LeaseRecord, *, accept: bool
) -> tuple[str, ...]:
    """Pass a start only if its code interprets the state like the code that wrote it, or if the change is accepted.

    Acceptance also holds for restarts of a start that fails before it is recorded.

    Args:
        stream: The stream.
        recovery: Where it is about to start; nothing has been changed yet.
        new: The plan of the query to start.
        lease: The lease of the stream.
        accept: A user accepts a change.

    Returns:
        The accepted changes, one message each for the run's log.

    Raises:
        PlanChangedError: The plan differs, and the change is not accepted.
    """
    change = plan_change(stream.catalog.streams.get(stream.stream_id), recovery, new)
    if change is None:
        return ()
    if accept:
        stream.catalog.streams.accept_plan(stream.stream_id, change.fingerprint, lease=lease)
    elif not change.is_accepted:
        refuse_plan_change(
            stream.stream_id, change.differences, came_from=change.came_from, fingerprint=change.fingerprint
        )
    return tuple(f"accepted change of the plan: {difference}" for difference in change.differences)
