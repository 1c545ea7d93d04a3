"""Preflight: runs new code on a copy of a stream's state, for one batch and without output, while the old code runs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.desired_states import PreflightRecord
from dagster_ckpt.errors import CkptError, RequestFailedError, StorageAccessError
from dagster_ckpt.operations.start_check import check_start
from dagster_ckpt.operations.trial_comparison import compare_trial
from dagster_ckpt.recovery.live_directories import restore_into, scratch_directory, snapshot_location
from dagster_ckpt.recovery.plan import RecoveryPlan, StartEmpty
from dagster_ckpt.recovery.plan_check import PlanChange, describe_differences
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.description import session_of
from dagster_ckpt.spark.query.trial_batch import Trial, copy_for_trial, describe_trial_error, run_trial
from dagster_ckpt.state.rewriting import rewrite_state
from dagster_ckpt.state.shape import StateShape
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import describe_snapshot, holding
from dagster_ckpt.stream.start_from import StartFrom

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

DEFAULT_TIMEOUT_S = 900.0


def preflight(
    stream: StreamHandle,
    describe: Callable[[], DataStreamWriter],
    *,
    state_partitions: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    interrupted: Callable[[], bool] = lambda: False,
    report: Callable[[str], None] = lambda _sentence: None,
) -> PreflightRecord:
    """Try whether the loaded code can resume from a stream's state. The stream may be running and is not changed.

    The newest committed batch is replayed, so that state is loaded, updated and written. If Spark
    no longer retains what that needs, or the sources no longer have the data, a batch of new data
    is processed instead, if there is any.

    Args:
        stream: The stream, with the code version to try.
        describe: Creates the unstarted writer.
        state_partitions: Rewrite the copy of the state to this number of partitions first.
        timeout_s: How long the batch may take.
        interrupted: Polled while it runs; if it returns True, the preflight ends.
        report: Called with a message for every step.

    Returns:
        The result, which is also recorded in the catalog.

    Raises:
        StreamNotFoundError: The stream was never started.
        RequestFailedError: It was interrupted.
        StorageAccessError: The state cannot be read, or the copy cannot be written.
    """
    stream.catalog.streams.get(stream.stream_id)
    change: PlanChange | None = None
    try:
        checked = check_start(stream, describe, StartFrom(state_partitions=state_partitions), report=report)
        change = checked.change
        trial, how = _try(
            stream,
            checked.plan,
            describe,
            rewrite=checked.rewrite,
            timeout_s=timeout_s,
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
    plan: RecoveryPlan,
    describe: Callable[[], DataStreamWriter],
    *,
    rewrite: StateShape | None,
    timeout_s: float,
    interrupted: Callable[[], bool],
    report: Callable[[str], None],
) -> tuple[Trial, str]:
    """The trial, and a description of it."""

    def run(scratch: LiveDirectory, *, replays: bool) -> tuple[Trial, list[str]]:
        name = f"{stream.name} preflight"
        with _rewritten(describe, scratch, rewrite, interrupted, report) as tried:
            trial = run_trial(describe, tried, name, replays=replays, timeout_s=timeout_s, interrupted=interrupted)
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
    rewrite: StateShape | None,
    interrupted: Callable[[], bool],
    report: Callable[[str], None],
) -> Iterator[LiveDirectory]:
    """The copy, or another one with rewritten state."""
    if rewrite is None:
        yield scratch
        return

    def watch() -> None:
        if interrupted():
            raise RequestFailedError("The preflight was interrupted while it rewrote the state.")

    rewritten = scratch.sibling(".rewritten")
    try:
        made = rewrite_state(session_of(describe()), scratch, rewritten, shape=rewrite, watch=watch, report=report)
        report(f"{made}, in a copy")
        yield rewritten
    finally:
        rewritten.delete()
