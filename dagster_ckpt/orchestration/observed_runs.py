"""How runs of streams ended, and which are lost, for the supervisor sensor. Starts nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import dagster as dg

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import AlertUntil, DesiredRecord
from dagster_ckpt.catalog.records import ExecutionRecord
from dagster_ckpt.client.reconciliation import RecordedEnd
from dagster_ckpt.errors import CkptError
from dagster_ckpt.orchestration._compat import notes_of, put_notes
from dagster_ckpt.orchestration.run_status import (
    DEPLOYMENT_TAG,
    OPERATION_TAG,
    RETENTION_OF_TAG,
    STEP_TAG,
    STREAM_ID_TAG,
    UNFINISHED,
    RunWorker,
    goes_on_without,
    has_time_limit,
    worker_of,
)
from dagster_ckpt.orchestration.stream import Stream
from dagster_ckpt.runtime.execution_end import record_death
from dagster_ckpt.stream.liveness import LIVELY_MS, SLOW_START_MS, Liveness, execution_liveness, run_liveness
from dagster_ckpt.values.durations import Clock, monotonic_ms, wall_clock_ms
from dagster_ckpt.values.modes import DesiredState
from dagster_ckpt.values.safe_parsing import number_in

# While code locations are replaced, none may define a stream.
UNDEFINED_GRACE_MS = 60_000
_CLAIMED_EACH_MS = 60_000


@dataclass(frozen=True)
class ObservedEnd:
    """An unsettled execution whose run is over; its death is recorded."""

    stream: Stream
    execution: ExecutionRecord
    recorded: RecordedEnd


def undefined_streams(
    instance: dg.DagsterInstance,
    catalog: Catalog,
    streams: Mapping[str, Stream],
    location: str | None,
    *,
    silences: Silences,
    claims: Claims,
) -> list[str]:
    """Report streams that this code location has started and not defined for a minute, and set alerts.

    Nothing restarts them, and a definition under another name would start empty.
    """
    claims.renew(instance, catalog.deployment_id, streams, location)
    runs = catalog.executions.unsettled_runs()
    rows = catalog.desired_states.all()
    wanted = [row.stream_id for row in rows.values() if row.desired is DesiredState.RUNNING]
    latest = catalog.executions.latest_of([each for each in wanted if each not in runs and each not in streams])
    runs |= {stream_id: execution.run_id for stream_id, execution in latest.items()}
    messages = []
    for row in rows.values():
        if row.alert_until is AlertUntil.DEFINED and (row.stream_id in streams or row.stream_id not in runs):
            _set_alert(catalog, row, None)
    undefined = {stream_id: run_id for stream_id, run_id in runs.items() if stream_id not in streams}
    # An asset may move to another code location while its query runs on.
    elsewhere = claims.of_others(instance, catalog.deployment_id, undefined, location)
    undefined = {stream_id: run_id for stream_id, run_id in undefined.items() if stream_id not in elsewhere}
    silences.keep(undefined)
    for stream_id, run_id in sorted(undefined.items()):
        run = instance.get_run_by_id(run_id)
        origin = run.remote_job_origin if run is not None else None
        if run is None or (location is not None and origin is not None and origin.location_name != location):
            continue
        if silences.of(stream_id, 0) < UNDEFINED_GRACE_MS:
            continue
        state = "is to run" if stream_id in latest else f"is not settled (run {run_id})"
        message = (
            f"it {state}, and no asset of this code location has this stream id, so nothing supervises it. "
            f"Set stream_id={stream_id!r} in the definition that continues it, or retire it: "
            f"dagster-ckpt retire {stream_id}"
        )
        messages.append(f"{stream_id}: {message}")
        # Otherwise it is unknown whose stream it is.
        if location is not None and origin is not None:
            row = rows.get(stream_id) or catalog.desired_states.ensure(stream_id, origin="the supervisor sensor")
            if row.alert is None:
                _set_alert(catalog, row, message)
    return messages


def _set_alert(catalog: Catalog, row: DesiredRecord, alert: str | None) -> None:
    catalog.desired_states.advance(
        row,
        upgrade=row.upgrade,
        alert=alert,
        alert_until=AlertUntil.DEFINED if alert is not None else None,
        request_id=row.request_id,
    )


def observed_ends(
    instance: dg.DagsterInstance, catalog: Catalog, streams: Mapping[str, Stream], alerts: list[str]
) -> Iterator[ObservedEnd]:
    """Find ended executions, and record deaths that processes could not record; errors are added to `alerts`."""
    unsettled = {run_id for stream_id, run_id in catalog.executions.unsettled_runs().items() if stream_id in streams}
    # Nearly all runs are in progress, so read only ids first.
    over = unsettled - unfinished_runs(instance, unsettled)
    runs = runs_by_id(instance, over)
    for found in catalog.executions.unsettled(over):
        # A run may have several streams.
        if found.stream_id not in streams:
            continue
        try:
            end = _end_with_run(instance, catalog, streams[found.stream_id], found, runs.get(found.run_id))
        except CkptError as error:
            # One unreadable lease must not block the others.
            alerts.append(f"{found.stream_id}: no action: {error}")
            continue
        yield end
    for found in catalog.executions.quiet(catalog.now_ms() - SLOW_START_MS):
        if found.stream_id not in streams or found.run_id in over:
            continue
        stream, execution = streams[found.stream_id], found
        try:
            if not has_left_its_run(instance, catalog, found, stream):
                continue
            execution = found if found.status.is_over else record_death(catalog, found)
        except CkptError as error:
            alerts.append(f"{found.stream_id}: no action: {error}")
            continue
        yield ObservedEnd(stream, execution, RecordedEnd.FAILED)


def _end_with_run(
    instance: dg.DagsterInstance,
    catalog: Catalog,
    stream: Stream,
    execution: ExecutionRecord,
    run: dg.DagsterRun | None,
) -> ObservedEnd:
    recorded = (
        recorded_external_end(instance, catalog, execution, run)
        if stream.runs_externally
        else recorded_end(instance, run)
    )
    if recorded is RecordedEnd.FAILED and not execution.status.is_over:
        execution = record_death(catalog, execution)
    return ObservedEnd(stream, execution, recorded)


def has_left_its_run(
    instance: dg.DagsterInstance, catalog: Catalog, execution: ExecutionRecord, stream: Stream
) -> bool:
    """Whether an execution has ended while its run executes other steps."""
    if stream.runs_externally or execution_liveness(catalog, execution) is Liveness.ALIVE:
        return False
    # Its process may still be cleaning up.
    if catalog.now_ms() - execution.heartbeat_at_ms <= SLOW_START_MS:
        return False
    run = instance.get_run_by_id(execution.run_id)
    return run is not None and run.status is dg.DagsterRunStatus.STARTED and goes_on_without(instance, run, stream.name)


def recorded_end(instance: dg.DagsterInstance, run: dg.DagsterRun | None) -> RecordedEnd:
    """Return how a run ended. A deleted run counts as failed.

    If the process is killed while a user terminates the run, Dagster records FAILURE, which counts as canceled here.
    """
    if run is None:
        return RecordedEnd.FAILED
    if run.status is dg.DagsterRunStatus.FAILURE:
        asked = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.RUN_CANCELING)
        by_a_person = bool(asked) and not has_time_limit(instance, run.tags)
        return RecordedEnd.CANCELED if by_a_person else RecordedEnd.FAILED
    if run.status is dg.DagsterRunStatus.CANCELED:
        return RecordedEnd.CANCELED
    if run.status is dg.DagsterRunStatus.SUCCESS:
        return RecordedEnd.SUCCEEDED
    return RecordedEnd.STILL_RUNNING


def unfinished_runs(instance: dg.DagsterInstance, run_ids: Collection[str]) -> frozenset[str]:
    if not run_ids:
        return frozenset()
    return frozenset(instance.get_run_ids(dg.RunsFilter(run_ids=list(run_ids), statuses=UNFINISHED)))


def runs_by_id(instance: dg.DagsterInstance, run_ids: Collection[str]) -> dict[str, dg.DagsterRun]:
    if not run_ids:
        return {}
    return {run.run_id: run for run in instance.get_runs(dg.RunsFilter(run_ids=list(run_ids)))}


def recorded_external_end(
    instance: dg.DagsterInstance, catalog: Catalog, execution: ExecutionRecord, run: dg.DagsterRun | None
) -> RecordedEnd:
    """Return how an execution that outlives its run ended; the run matters only if it was canceled."""
    if execution_liveness(catalog, execution) is Liveness.ALIVE:
        return RecordedEnd.STILL_RUNNING
    recorded = recorded_end(instance, run)
    return RecordedEnd.FAILED if recorded is RecordedEnd.SUCCEEDED else recorded


class Silences:
    """How long runs or streams have been silent by this process's clock, as clocks of machines differ."""

    def __init__(self, clock: Clock = monotonic_ms) -> None:
        self._clock = clock
        self._since: dict[str, tuple[int, int]] = {}

    def keep(self, run_ids: Collection[str]) -> None:
        self._since = {run_id: since for run_id, since in self._since.items() if run_id in run_ids}

    def of(self, run_id: str, last_sign: int) -> int:
        """Return the time in ms since the newest sign of life was first seen."""
        seen, since_ms = self._since.get(run_id, (None, 0))
        if seen != last_sign:
            since_ms = self._clock()
            self._since[run_id] = (last_sign, since_ms)
        return self._clock() - since_ms


class Claims:
    """Which supervisor sensor of this Dagster instance defines a stream, noted once a minute."""

    def __init__(self, sensor: str, clock: Clock = wall_clock_ms) -> None:
        self._sensor = sensor
        self._clock = clock
        self._noted_ms = 0

    def renew(
        self, instance: dg.DagsterInstance, deployment_id: str, stream_ids: Collection[str], location: str | None
    ) -> None:
        now_ms = self._clock()
        if abs(now_ms - self._noted_ms) >= _CLAIMED_EACH_MS:
            claim = f"{now_ms} {location}/{self._sensor}"
            put_notes(instance, {_claim(deployment_id, each): claim for each in stream_ids})
            self._noted_ms = now_ms

    def of_others(
        self, instance: dg.DagsterInstance, deployment_id: str, stream_ids: Collection[str], location: str | None
    ) -> frozenset[str]:
        notes = notes_of(instance, [_claim(deployment_id, each) for each in stream_ids])
        now_ms, found = self._clock(), set[str]()
        for stream_id in stream_ids:
            at, _, sensor = notes.get(_claim(deployment_id, stream_id), "").partition(" ")
            at_ms = number_in(at)
            is_new = at_ms is not None and now_ms - at_ms < 3 * _CLAIMED_EACH_MS
            if is_new and sensor != f"{location}/{self._sensor}":
                found.add(stream_id)
        return frozenset(found)


def _claim(deployment_id: str, stream_id: str) -> str:
    return f"dagster_ckpt/supervised/{deployment_id}/{stream_id}"


def report_lost_runs(
    instance: dg.DagsterInstance, catalog: Catalog, stream_ids: Collection[str], silences: Silences, alerts: list[str]
) -> list[str]:
    """Record the end of lost runs, and return a message for each; errors are added to `alerts`.

    A run is lost if its process does not exist, none of its leases is being renewed, and it is either proven to have
    ended or has shown no sign of life for three minutes. It is CANCELED if it was being terminated, else a FAILURE.
    """
    if instance.run_launcher.supports_check_run_worker_health and instance.run_monitoring_enabled:
        # Dagster's run monitoring detects them.
        return []
    deployment_id = catalog.deployment_id
    lively = catalog.executions.lively_run_ids(catalog.now_ms() - LIVELY_MS)
    under_way = [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]
    messages = []
    quiet = [run_id for run_id in instance.get_run_ids(dg.RunsFilter(statuses=under_way)) if run_id not in lively]
    silences.keep(quiet)
    for run in instance.get_runs(dg.RunsFilter(run_ids=quiet)) if quiet else ():
        # The status may have changed since the first query, and no end must be recorded twice.
        if not _is_watched(run, stream_ids, deployment_id) or run.status not in under_way:
            continue
        worker = worker_of(instance, run.run_id)
        try:
            if worker is None or not _is_lost(catalog, run, worker, silences):
                continue
        except CkptError as error:
            alerts.append(f"{run.tags[STREAM_ID_TAG]}: no action: {error}")
            continue
        messages.append(_report(instance, run, worker))
    return messages


def _is_watched(run: dg.DagsterRun, stream_ids: Collection[str], deployment_id: str) -> bool:
    if run.tags.get(STREAM_ID_TAG) not in stream_ids:
        return False
    # The catalog of another deployment has its signs of life.
    if run.tags.get(DEPLOYMENT_TAG, deployment_id) != deployment_id:
        return False
    # An operator's run may be silent for hours. Only one that the supervisor launched would block it.
    return OPERATION_TAG not in run.tags or RETENTION_OF_TAG in run.tags or STEP_TAG in run.tags


def _is_lost(catalog: Catalog, run: dg.DagsterRun, worker: RunWorker, silences: Silences) -> bool:
    heartbeats = (execution.heartbeat_at_ms for execution in catalog.executions.of_run(run.run_id))
    liveness = run_liveness(
        catalog,
        run.run_id,
        run.tags[STREAM_ID_TAG],
        pid=worker.pid,
        seen_at_ms=worker.seen_at_ms,
        silent_ms=silences.of(run.run_id, max(heartbeats, default=0)),
    )
    return liveness is not Liveness.ALIVE


def _report(instance: dg.DagsterInstance, run: dg.DagsterRun, worker: RunWorker) -> str:
    message = (
        f"The process of this run, {worker.pid}, has ended without recording it: its machine was restarted, or it was "
        "killed together with its code server."
    )
    if run.status is dg.DagsterRunStatus.CANCELING:
        instance.report_run_canceled(run, message=message)
    else:
        instance.report_run_failed(run, message=message)
    return f"{run.tags[STREAM_ID_TAG]}: run {run.run_id} is lost, process {worker.pid} has ended"
