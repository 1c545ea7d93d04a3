"""Gathers health facts of many streams from the catalog in few queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import DesiredRecord
from dagster_ckpt.catalog.records import ExecutionRecord, ExecutionStatus, SnapshotRecord
from dagster_ckpt.catalog.recoveries import PointFailure
from dagster_ckpt.config.durations import utc_time
from dagster_ckpt.config.modes import DesiredState
from dagster_ckpt.operations.health import Finding, HealthFacts, Verdict, judge, worst
from dagster_ckpt.operations.health_settings import HealthSettings
from dagster_ckpt.operations.source_health import sources_of
from dagster_ckpt.recovery.recovery_points import failed_points, snapshot_point
from dagster_ckpt.runtime.stall import QueryInactivity
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.liveness import LIVELY_MS


@dataclass(frozen=True)
class StreamHealth:
    """The health of one stream.

    Attributes:
        stream_id: The stream.
        verdict: The worst verdict of its checks.
        findings: One per check.
    """

    stream_id: str
    verdict: Verdict
    findings: tuple[Finding, ...]

    def messages(self) -> list[str]:
        """The findings as log messages."""
        return [f"{each.check.value}: {each.verdict.value}, {each.message}" for each in self.findings]


_ALIVE = (ExecutionStatus.STARTING, ExecutionStatus.RUNNING)


def stream_health(stream: StreamHandle, settings: HealthSettings) -> StreamHealth:
    """Judge one stream by what the catalog knows of it.

    Raises:
        StreamNotFoundError: It was never started.
    """
    catalog, stream_id = stream.catalog, stream.stream_id
    catalog.streams.get(stream_id)
    now_ms = catalog.now_ms()
    facts = health_facts(catalog, {stream_id: settings}, now_ms=now_ms)[stream_id]
    findings = judge(facts, stream.options, settings, now_ms=now_ms)
    return StreamHealth(stream_id, worst(findings), tuple(findings))


def health_facts(catalog: Catalog, settings: Mapping[str, HealthSettings], *, now_ms: int) -> dict[str, HealthFacts]:
    """Gather the facts for health checks. Reads only the catalog: no storage, no source, no running query.

    Args:
        catalog: The catalog.
        settings: The thresholds by stream id; selects the streams.
        now_ms: The current time, in ms since the epoch.
    """
    stream_ids: Sequence[str] = list(settings)
    executions = catalog.executions.latest_of(stream_ids)
    windows = {stream_id: now_ms - each.size_window_ms for stream_id, each in settings.items()}
    histories = catalog.snapshots.histories(windows)
    desired = catalog.desired_states.of(stream_ids)
    since_ms = now_ms - max((each.loop_window_ms for each in settings.values()), default=0)
    failed = catalog.executions.failed_since(stream_ids, since_ms)
    recoveries = catalog.recoveries.of_streams(stream_ids)
    first_started = catalog.executions.first_started(stream_ids)
    facts = {}
    for stream_id in stream_ids:
        execution, history = executions.get(stream_id), histories[stream_id]
        progress = (execution.progress if execution is not None else None) or {}
        speed = progress.get("rows_per_second")
        after_ms = max(now_ms - settings[stream_id].loop_window_ms, _completed_at_ms(history.newest))
        failed_runs = [end for end in failed.get(stream_id, ()) if end.at_ms > after_ms]
        silent = _why_silent(catalog, execution, now_ms)
        facts[stream_id] = HealthFacts(
            running_since_ms=_running_since_ms(execution) if silent is None else None,
            newest=history.newest,
            verified=history.verified,
            failures=history.failures,
            last_failure=history.last_failure,
            bytes_before=history.bytes_before,
            slowest_ms=history.slowest_ms,
            sources=sources_of(progress),
            rows_per_second=speed if isinstance(speed, int | float) else None,
            desired=desired.get(stream_id),
            heartbeat_at_ms=_heartbeat_at_ms(execution),
            process=f"process {execution.pid} on {execution.host}" if execution is not None else None,
            down=silent or _why_down(execution, desired.get(stream_id)),
            down_since_ms=_down_since_ms(execution),
            failed_runs=len(failed_runs),
            last_end=failed_runs[-1].reason if failed_runs else None,
            first_started_ms=first_started.get(stream_id),
            unrestorable=_why_unrestorable(history.newest, recoveries.get(stream_id, ())),
            inactivity=QueryInactivity.of_record(progress.get("activity")),
        )
    return facts


def _completed_at_ms(snapshot: SnapshotRecord | None) -> int:
    return (snapshot.completed_at_ms or 0) if snapshot is not None else 0


def _why_unrestorable(newest: SnapshotRecord | None, failures: Sequence[PointFailure]) -> str | None:
    return None if newest is None else failed_points(failures).get(snapshot_point(newest.snapshot_id))


def _running_since_ms(execution: ExecutionRecord | None) -> int | None:
    return execution.started_at_ms if execution is not None and execution.status in _ALIVE else None


def _why_down(execution: ExecutionRecord | None, desired: DesiredRecord | None) -> str | None:
    """Why a stream is not running although it should: its last run failed, or its desired state is RUNNING."""
    if execution is not None and execution.status in _ALIVE:
        return None
    if execution is not None and execution.status is ExecutionStatus.FAILED:
        return f"its last run failed: {execution.reason}"
    if desired is not None and desired.desired is DesiredState.RUNNING:
        return "its desired state is RUNNING"
    return None


def _why_silent(catalog: Catalog, execution: ExecutionRecord | None, now_ms: int) -> str | None:
    """Why an execution that the catalog believes alive is not: it neither sends heartbeats nor renews its lease."""
    if execution is None or execution.status not in _ALIVE or now_ms - execution.heartbeat_at_ms <= LIVELY_MS:
        return None
    lease = catalog.leases.current(execution.stream_id)
    # A process that restores for hours sends no heartbeat, but renews its lease.
    if lease is not None and lease.execution_id == execution.execution_id and not lease.expired:
        return None
    return (
        f"process {execution.pid} on {execution.host} has sent no heartbeat since "
        f"{utc_time(execution.heartbeat_at_ms)} and lost its lease: it is gone, or it hangs"
    )


def _down_since_ms(execution: ExecutionRecord | None) -> int | None:
    if execution is None:
        return None
    return execution.heartbeat_at_ms if execution.status in _ALIVE else execution.ended_at_ms


def _heartbeat_at_ms(execution: ExecutionRecord | None) -> int | None:
    # An execution that is starting may restore for hours and sends no heartbeat in the meantime.
    is_running = execution is not None and execution.status is ExecutionStatus.RUNNING
    return execution.heartbeat_at_ms if execution is not None and is_running else None
