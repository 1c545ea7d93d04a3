"""Compares plan and state backend of the query to start with those that wrote the state."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from dagster_ckpt.catalog.records import LeaseRecord, StreamRecord
from dagster_ckpt.config.state_backend import PROVIDER_CLASS, OnStateChange, PinnedState, backend_change
from dagster_ckpt.errors import (
    LiveDirectoryError,
    OptionError,
    PlanChangedError,
    SparkNotFoundError,
    StateBackendChangeError,
    StatePartitionsError,
)
from dagster_ckpt.recovery.operator_compatibility import (
    describe_differences,
    evolve,
    has_other_rows,
    plan_differences,
    refused_reasons,
)
from dagster_ckpt.recovery.plan import RecoveryPlan, Restore, StartEmpty
from dagster_ckpt.spark.checkpoint_dir.inspect import (
    LiveStatus,
    check_pinned_provider,
    inspect_live_directory,
    pinned_state,
)
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import STATE_FORMAT
from dagster_ckpt.spark.checkpoint_dir.operators import KnownQuery
from dagster_ckpt.spark.checkpoint_dir.state_files import HEAP
from dagster_ckpt.spark.query.plan import PlanDescription, read_plan
from dagster_ckpt.spark.versions import Feature, installed_release
from dagster_ckpt.state.rewriter import Rewriter
from dagster_ckpt.state.rewriting import shape_in, stored_state
from dagster_ckpt.state.stopped_state import StateShape, StoredState, WantedShape, check_rewrite
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.ownership import adopted_directory
from dagster_ckpt.stream.start_from import StartFrom


def refuse_plan_change(stream_id: str, change: PlanChange) -> NoReturn:
    ways = []
    if change.is_migratable:
        ways.append("To keep what of the state still means something, start with migrate_state.")
    if change.fits:
        ways.append(
            "If the change is intended and the state fits it, start with accept_plan_change; from a program: "
            f"client.accept_plan_change({stream_id!r}, {change.fingerprint!r})."
        )
    ways.append("Otherwise restore the previous query, or start without state: start_from=empty, or a new stream.")
    spark = (
        "Spark compares types only, so it may mix the old state with the new."
        if change.fits
        else "Spark would refuse the stored rows, which have other columns."
    )
    raise PlanChangedError(
        f"Stream {stream_id!r} is not started, nothing was changed: the code would continue from {change.came_from} "
        f"with a plan that differs from the one that wrote this state. {describe_differences(change.differences)} "
        f"{spark} {' '.join(ways)}"
    )


@dataclass(frozen=True)
class StateCheck:
    messages: tuple[str, ...] = ()
    rewrite: StateShape | None = None


def check_state(stream: StreamHandle, plan: RecoveryPlan, start_from: StartFrom) -> StateCheck:
    """Compare the state with how the stream is to keep it; a returned rewrite is possible and allowed."""
    if isinstance(plan, StartEmpty):
        return StateCheck()
    shape = _shape(stream, plan)
    partitions = _wanted_partitions(stream, start_from, shape)
    provider, version, messages = _wanted_backend(stream, plan, shape)
    if shape is None:
        return StateCheck(messages)
    wanted = WantedShape(partitions, provider, version).of(shape)
    if wanted == shape:
        return StateCheck(messages)
    _check_can_be_rewritten(stream, plan, wanted)
    rewrite_message = f"the state is rewritten: {shape} becomes {wanted}"
    return StateCheck((*messages, rewrite_message, *_without_rewriter()), wanted)


def _without_rewriter() -> tuple[str, ...]:
    """Return a message if this machine cannot rewrite state; the process of the query checks for itself."""
    with suppress(SparkNotFoundError):
        if not installed_release().has(Feature.STATE_REWRITER) and Rewriter.find() is None:
            return (
                f"{installed_release()} cannot rewrite state, and this machine has no rewriter: where the query runs, "
                "the start needs `dagster-ckpt rewriter install`",
            )
    return ()


def _check_can_be_rewritten(stream: StreamHandle, plan: RecoveryPlan, wanted: StateShape) -> None:
    stored = (
        StoredState.of_properties(_properties(stream, plan))
        if isinstance(plan, Restore)
        else stored_state(_live(stream, plan))
    )
    if stored is not None:
        check_rewrite(stored, wanted)


def _wanted_partitions(stream: StreamHandle, start_from: StartFrom, shape: StateShape | None) -> int | None:
    asked, configured = start_from.state_partitions, stream.state_partitions
    if configured is None:
        return asked
    if asked is not None and asked != configured.number:
        raise OptionError(
            f"state_partitions is {asked}, but the max parallelism of stream {stream.stream_id!r} is "
            f"{configured.number}. Set the max parallelism to {asked}, or leave it unset."
        )
    is_other = shape is not None and shape.partitions != configured.number
    if is_other and asked is None and configured.on_change is OnStateChange.REFUSE:
        raise StatePartitionsError(
            f"Stream {stream.stream_id!r} keeps its state in {shape.partitions if shape else 0} partitions, but the "
            f"max parallelism is {configured.number}. The number decides which key is in which partition, so the "
            "state has to be rewritten, which needs your permission: "
            f"set_max_parallelism({configured.number}, allow_state_rewrite=True). Or set the max parallelism to the "
            "number of the state, or leave it unset."
        )
    return configured.number


def _wanted_backend(
    stream: StreamHandle, plan: RecoveryPlan, shape: StateShape | None
) -> tuple[str | None, int | None, tuple[str, ...]]:
    if stream.backend is None:
        return None, None, ()
    change = backend_change(_pinned(stream, plan), stream.backend)
    if change.refused is not None:
        _check_log(stream, plan)
        if stream.on_backend_change is OnStateChange.REFUSE:
            raise StateBackendChangeError(f"Stream {stream.stream_id!r} cannot be started. {change.refused}")
    settings = stream.backend.spark_settings()
    version = int(settings[STATE_FORMAT]) if settings.get(STATE_FORMAT) else None
    if stream.on_backend_change is OnStateChange.REFUSE:
        if shape is not None and shape.provider == settings[PROVIDER_CLASS] != HEAP:
            _refuse_other_format(stream, shape.checkpoint_format, version)
        return None, None, change.kept
    return settings[PROVIDER_CLASS], version, change.kept


def _refuse_other_format(stream: StreamHandle, stored: int, wanted: int | None) -> None:
    # Spark keeps the format of the newest commit, regardless of the session's setting
    # (`CheckpointVersionManager.resolveCommitLogVersion` of Spark 4.3).
    if wanted not in (None, stored):
        raise StateBackendChangeError(
            f"Stream {stream.stream_id!r} cannot be started. Its state is in checkpoint format v{stored}, but the "
            f"state backend sets {STATE_FORMAT} to {wanted}, which Spark would ignore. Set it to {stored}, leave "
            "it out, or let the start convert the state (on_change: CONVERT of the state backend)."
        )


def _properties(stream: StreamHandle, plan: Restore) -> Mapping[str, Any]:
    location = plan.snapshot.location
    return stream.store.manifest(location).header.properties if location is not None else {}


def _live(stream: StreamHandle, plan: RecoveryPlan) -> LiveDirectory:
    return LiveDirectory(plan.directory or stream.catalog.streams.get(stream.stream_id).live_directory or "")


def _shape(stream: StreamHandle, plan: RecoveryPlan) -> StateShape | None:
    if isinstance(plan, Restore):
        stored = StoredState.of_properties(_properties(stream, plan))
        return stored.shape if stored is not None else None
    record = stream.catalog.streams.get(stream.stream_id)
    return None if record.live_directory is None else shape_in(_live(stream, plan))


def _pinned(stream: StreamHandle, plan: RecoveryPlan) -> PinnedState:
    if isinstance(plan, Restore):
        provider = _properties(stream, plan).get("state_store_provider")
        return PinnedState(provider if isinstance(provider, str) else None)
    is_new = stream.catalog.streams.get(stream.stream_id).live_directory is None
    return PinnedState(None) if is_new else pinned_state(_live(stream, plan))


def _check_log(stream: StreamHandle, plan: RecoveryPlan) -> None:
    # A damaged name is no change of the backend: a recovery tries the next point.
    is_new = stream.catalog.streams.get(stream.stream_id).live_directory is None
    if not isinstance(plan, Restore) and not is_new:
        check_pinned_provider(_live(stream, plan))


@dataclass(frozen=True)
class PlanChange:
    """How the plan differs from the one that wrote the state; if it `fits`, Spark may take the state as it is."""

    differences: tuple[str, ...]
    came_from: str
    fingerprint: str
    is_accepted: bool
    fits: bool = True
    is_migratable: bool = False


def plan_change(record: StreamRecord, recovery: RecoveryPlan, new: PlanDescription | None) -> PlanChange | None:
    old = old_plan(record, recovery)
    differences = plan_differences(old, new) if old is not None and new is not None else ()
    if new is None or old is None or not differences:
        return None
    decisions = evolve(old, new)
    return PlanChange(
        differences,
        recovery.came_from,
        new.fingerprint,
        record.accepted_plan == new.fingerprint,
        fits=not has_other_rows(decisions, old),
        is_migratable=not refused_reasons(decisions),
    )


def old_plan(record: StreamRecord, recovery: RecoveryPlan) -> PlanDescription | None:
    if isinstance(recovery, StartEmpty):
        return None
    if isinstance(recovery, Restore):
        return read_plan(record.plan_of(recovery.snapshot))
    return read_plan(record.plan_in(recovery.directory))


def check_plan(
    stream: StreamHandle, recovery: RecoveryPlan, new: PlanDescription | None, lease: LeaseRecord, *, accept: bool
) -> tuple[str, ...]:
    """Refuse a start whose code reads the state differently, unless accepted; return a message for each change.

    Acceptance is stored for restarts of a start that fails before it is recorded.
    """
    record = stream.catalog.streams.get(stream.stream_id)
    _refuse_adopted_without_state(record, recovery, new)
    change = plan_change(record, recovery, new)
    if change is None:
        return ()
    if accept:
        stream.catalog.streams.accept_plan(stream.stream_id, change.fingerprint, lease=lease)
    elif not change.is_accepted:
        refuse_plan_change(stream.stream_id, change)
    return tuple(f"accepted change of the plan: {difference}" for difference in change.differences)


def _refuse_adopted_without_state(record: StreamRecord, recovery: RecoveryPlan, new: PlanDescription | None) -> None:
    """Refuse a directory without the state that the code keeps; before the code is known, that is no damage."""
    adopted = adopted_directory(record)
    if adopted is None or not adopted.is_pending or new is None or isinstance(recovery, StartEmpty):
        return
    state = inspect_live_directory(LiveDirectory(adopted.directory), KnownQuery.of(new.as_record()))
    if state.status is LiveStatus.BROKEN:
        raise LiveDirectoryError(
            f"Stream {record.stream_id!r} is not started, nothing was changed, and the query that wrote the adopted "
            f"directory was not fenced. The code keeps state, but {adopted.directory} does not have it: "
            f"{state.reason.partition('. ')[0]}. If it was deleted, put it back from a backup and start again. "
            "Otherwise the code is not that of the query that wrote there: start that code, or drop the adoption "
            f"(dagster-ckpt adopt {record.stream_id} {adopted.directory} --undo)."
        )
