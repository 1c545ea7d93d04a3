"""Judges a stream's health from facts in the catalog."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from dagster_ckpt.catalog.desired_states import UpgradePhase
from dagster_ckpt.client.health_facts import (
    HealthFacts,
    HealthSettings,
    health_facts,
    lag,
    largest_lag,
    reporting_lag,
    retention,
)
from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import describe_snapshot
from dagster_ckpt.values.durations import headline, rounded_duration, size, utc_time

MINUTE_MS = 60_000
_Figures = dict[str, int | float | str]


class HealthCheck(StrEnum):
    """The health checks; the value is the name of the asset check.

    Example:
        >>> stream_definitions(orders, health_checks=[HealthCheck.RESTORABILITY, HealthCheck.PROGRESS])
    """

    RESTORABILITY = "restorability"
    CHECKPOINT_AGE = "checkpoint_age"
    CONSECUTIVE_FAILURES = "consecutive_failures"
    PROGRESS = "progress"
    SIZE_GROWTH = "size_growth"
    SOURCE_LAG = "source_lag"
    SOURCE_RETENTION = "source_retention"
    EVENT_TIME = "event_time"
    DESIRED_STATE = "desired_state"


class Verdict(StrEnum):
    """Outcome of a health check; UNKNOWN, if it cannot be evaluated, is not a PASS."""

    PASS = "PASS"
    WARN = "WARN"
    ERROR = "ERROR"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class Finding:
    check: HealthCheck
    verdict: Verdict
    message: str
    figures: Mapping[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamHealth:
    stream_id: str
    verdict: Verdict
    findings: tuple[Finding, ...]

    def messages(self) -> list[str]:
        return [f"{each.check.value}: {each.verdict.value}, {each.message}" for each in self.findings]


def stream_health(stream: StreamHandle, settings: HealthSettings) -> StreamHealth:
    catalog, stream_id = stream.catalog, stream.stream_id
    catalog.streams.get(stream_id)
    now_ms = catalog.now_ms()
    facts = health_facts(catalog, {stream_id: settings}, now_ms=now_ms)[stream_id]
    findings = judge(facts, stream.options, settings, now_ms=now_ms)
    return StreamHealth(stream_id, worst(findings), tuple(findings))


def judge(facts: HealthFacts, options: CheckpointOptions, settings: HealthSettings, *, now_ms: int) -> list[Finding]:
    """Evaluate all checks. None passes for a stream that was never started."""
    findings = [
        restorability(facts, settings, now_ms=now_ms),
        checkpoint_age(facts, options, settings, now_ms=now_ms),
        consecutive_failures(facts, settings),
        progress(facts, options, settings, now_ms=now_ms),
        size_growth(facts, settings),
        source_lag(facts, settings, now_ms=now_ms),
        source_retention(facts, settings, now_ms=now_ms),
        event_time(facts, settings, now_ms=now_ms),
        desired_state(facts),
    ]
    if not facts.was_never_started:
        return findings
    return [
        Finding(each.check, Verdict.UNKNOWN, "the stream was never started") if each.verdict is Verdict.PASS else each
        for each in findings
    ]


def worst(findings: Sequence[Finding]) -> Verdict:
    return max((finding.verdict for finding in findings), key=_WORSE.index, default=Verdict.PASS)


def restorability(facts: HealthFacts, settings: HealthSettings, *, now_ms: int) -> Finding:
    finding = partial(Finding, HealthCheck.RESTORABILITY)
    if facts.newest is not None and facts.unrestorable is not None:
        return finding(Verdict.ERROR, f"a recovery failed at {describe_snapshot(facts.newest)}: {facts.unrestorable}")
    # An older snapshot may have been verified after the newest one.
    snapshot = facts.newest if facts.newest is not None and facts.newest.verified_problem else facts.verified
    if snapshot is None or snapshot.verified_at_ms is None:
        if facts.newest is None:
            return finding(Verdict.UNKNOWN, "there is no snapshot yet that could be restored")
        return finding(
            Verdict.UNKNOWN,
            f"no snapshot was ever verified: run dagster-ckpt verify {facts.newest.stream_id}, "
            "or verify_snapshots_job, or turn on checkpoint_verification_schedule",
        )
    age_ms = now_ms - snapshot.verified_at_ms
    verified = f"{describe_snapshot(snapshot)} was verified at {utc_time(snapshot.verified_at_ms)}"
    figures: _Figures = {"verification_age_ms": age_ms, "verified_snapshot": describe_snapshot(snapshot)}
    if snapshot.verified_problem is not None:
        return finding(
            Verdict.ERROR, f"{describe_snapshot(snapshot)} cannot be restored: {snapshot.verified_problem}", figures
        )
    if age_ms > settings.max_verification_age_ms:
        limit = rounded_duration(settings.max_verification_age_ms)
        return finding(Verdict.WARN, f"{verified}, and no snapshot since; the limit is {limit}", figures)
    if facts.broken is not None:
        older = f"{describe_snapshot(facts.broken)} cannot be restored: {facts.broken.verified_problem}"
        return finding(Verdict.WARN, f"{verified}, but {older}", figures)
    return finding(Verdict.PASS, verified, figures)


def checkpoint_age(facts: HealthFacts, options: CheckpointOptions, settings: HealthSettings, *, now_ms: int) -> Finding:
    """Judge how much work a failure now would repeat: the recovery point objective."""
    finding = partial(Finding, HealthCheck.CHECKPOINT_AGE)
    if facts.running_since_ms is None and facts.down is not None:
        return finding(_of_down(facts, options, now_ms), f"the stream should be running but is not: {facts.down}")
    if facts.running_since_ms is None:
        return finding(Verdict.PASS, "the stream is not running")
    limit_ms = settings.max_checkpoint_age_ms
    if limit_ms is None and options.known_interval_ms is None:
        why = "the trigger sets no interval" if options.is_checkpointing_enabled else "periodic checkpoints are off"
        return finding(Verdict.PASS, f"{why}, and no maximum age is set")
    if facts.newest is None and not facts.failures and facts.inactivity is not None and facts.inactivity.is_idle:
        return finding(Verdict.PASS, "the query is idle and has committed no batch that a snapshot could contain")
    if limit_ms is None:
        limit_ms = max(options.known_interval_ms or 0, options.timeout) * (options.tolerable_failures + 2)
    usual_ms = _usual_age_ms(facts, options, settings, limit_ms)
    # A stream that has just started had no time for a snapshot.
    taken_ms = (facts.newest.completed_at_ms or 0) if facts.newest is not None else 0
    since_ms = max(taken_ms, facts.running_since_ms)
    age_ms = now_ms - since_ms
    figures: _Figures = {
        "checkpoint_age_ms": age_ms,
        "usual_checkpoint_age_ms": usual_ms,
        "max_checkpoint_age_ms": limit_ms,
    }
    if taken_ms >= since_ms:
        message = f"the newest snapshot is of {utc_time(since_ms)}"
    else:
        message = f"there is no snapshot since the start, which was at {utc_time(since_ms)}"
    message += (
        f"; its age is usually up to {rounded_duration(usual_ms)} and must not exceed {rounded_duration(limit_ms)}"
    )
    if age_ms > limit_ms:
        return finding(Verdict.ERROR, message, figures)
    return finding(Verdict.WARN if age_ms > usual_ms else Verdict.PASS, message, figures)


def _usual_age_ms(facts: HealthFacts, options: CheckpointOptions, settings: HealthSettings, limit_ms: int) -> int:
    if settings.max_checkpoint_age_ms is not None or options.known_interval_ms is None or facts.slowest_ms is None:
        return limit_ms // 2
    between_ms = max(options.known_interval_ms, options.min_pause)
    return min(between_ms * (options.tolerable_failures + 2) + facts.slowest_ms, limit_ms)


def _of_down(facts: HealthFacts, options: CheckpointOptions, now_ms: int) -> Verdict:
    grace_ms = options.known_interval_ms or MINUTE_MS
    is_over = facts.down_since_ms is None or now_ms - facts.down_since_ms >= grace_ms
    return Verdict.ERROR if is_over else Verdict.WARN


def consecutive_failures(facts: HealthFacts, settings: HealthSettings) -> Finding:
    finding = partial(Finding, HealthCheck.CONSECUTIVE_FAILURES)
    figures: _Figures = {"consecutive_failures": facts.failures}
    if facts.failures < settings.failures_to_warn:
        return finding(Verdict.PASS, f"{facts.failures} attempts failed since the newest snapshot", figures)
    verdict = Verdict.ERROR if facts.failures >= settings.failures_to_fail else Verdict.WARN
    return finding(verdict, f"{facts.failures} attempts failed in a row, the last one: {facts.last_failure}", figures)


def progress(facts: HealthFacts, options: CheckpointOptions, settings: HealthSettings, *, now_ms: int) -> Finding:
    finding = partial(Finding, HealthCheck.PROGRESS)
    if facts.running_since_ms is None and facts.down is not None:
        return finding(_of_down(facts, options, now_ms), f"the stream should be running but is not: {facts.down}")
    if facts.failed_runs >= settings.loop_failures:
        message = f"the stream restarts in a loop: {facts.failed_runs} runs failed since the newest snapshot was "
        message += f"completed, the last one: {facts.last_end}. cancel_stream_job stops it; doctor_job looks for damage"
        return finding(Verdict.ERROR, message, {"failed_runs": facts.failed_runs})
    if facts.heartbeat_at_ms is None:
        return finding(Verdict.PASS, "no query is running")
    limit_ms = settings.max_stall_ms
    silent_ms = max(0, now_ms - facts.heartbeat_at_ms)
    if silent_ms > limit_ms:
        message = f"{facts.process} has sent no heartbeat since {utc_time(facts.heartbeat_at_ms)}: it has ended, or it "
        message += "hangs. If the supervisor sensor does not start another run, kill that process"
        return finding(Verdict.ERROR, message, {"silent_for_ms": silent_ms, "max_stall_ms": limit_ms})
    return _inactivity(facts, limit_ms, silent_ms, now_ms)


def _inactivity(facts: HealthFacts, limit_ms: int, silent_ms: int, now_ms: int) -> Finding:
    finding = partial(Finding, HealthCheck.PROGRESS)
    activity = facts.inactivity
    if activity is None and facts.running_since_ms is not None and now_ms - facts.running_since_ms <= MINUTE_MS:
        return finding(Verdict.PASS, "the query has just been started")
    if activity is None:
        return finding(Verdict.UNKNOWN, f"{facts.process} does not report what its query is doing")
    if activity.is_idle:
        return finding(Verdict.PASS, f"the query is idle: {activity.doing}")
    stalled_ms = activity.stalled_for_ms + silent_ms
    figures: _Figures = {"doing": activity.doing, "stalled_for_ms": stalled_ms, "max_stall_ms": limit_ms}
    message = f"the query has been at {activity.doing!r} since {utc_time(now_ms - stalled_ms)}"
    if stalled_ms <= limit_ms:
        return finding(Verdict.PASS, message, figures)
    tasks = activity.tasks
    if tasks is not None and tasks.running:
        message += (
            f": {tasks.running} of {tasks.total} tasks of its batch are running, {tasks.done} are done. The batch "
        )
        message += "may only be slow: check the running tasks in Spark's UI"
        return finding(Verdict.WARN, message, figures)
    if tasks is not None and tasks.jobs:
        message += f", and no task of its {tasks.jobs} Spark jobs is running"
    message += (
        f". Use jstack to find out what the JVM of {facts.process} is waiting for, then run restart_stream_job; if the "
    )
    message += "query does not stop, kill that process"
    return finding(Verdict.ERROR, message, figures)


def size_growth(facts: HealthFacts, settings: HealthSettings) -> Finding:
    finding = partial(Finding, HealthCheck.SIZE_GROWTH)
    full_bytes = facts.newest.full_bytes if facts.newest is not None else None
    if full_bytes is None:
        if facts.newest is None:
            return finding(Verdict.PASS, "there is no snapshot yet")
        return finding(Verdict.UNKNOWN, "the size of the newest snapshot is unknown")
    figures: _Figures = {"full_bytes": full_bytes}
    has = f"a snapshot has {size(full_bytes)}"
    if settings.max_snapshot_bytes is not None and full_bytes > settings.max_snapshot_bytes:
        return finding(Verdict.ERROR, f"{has}; the limit is {size(settings.max_snapshot_bytes)}", figures)
    if not facts.bytes_before:
        return finding(Verdict.PASS, f"{has}; there is no earlier one to compare it with", figures)
    factor = full_bytes / facts.bytes_before
    figures["growth_factor"] = round(factor, 3)
    window = rounded_duration(settings.size_window_ms)
    message = f"{has}, {factor:.2f} times as much as the first one of the last {window}"
    grows = full_bytes > settings.size_floor_bytes and factor >= settings.size_growth_factor
    if factor >= settings.size_growth_factor and not grows:
        message += f"; growth is not judged below {size(settings.size_floor_bytes)}"
    return finding(Verdict.WARN if grows else Verdict.PASS, message, figures)


def source_lag(facts: HealthFacts, settings: HealthSettings, *, now_ms: int) -> Finding:
    finding = partial(Finding, HealthCheck.SOURCE_LAG)
    if facts.running_since_ms is None and facts.down is not None:
        return finding(Verdict.UNKNOWN, f"the stream should be running but is not: {facts.down}")
    if facts.running_since_ms is None:
        return finding(Verdict.PASS, "the stream is not running")
    if facts.sources is None:
        is_idle = facts.inactivity is not None and facts.inactivity.is_idle
        is_new = now_ms - facts.running_since_ms <= settings.max_stall_ms
        return finding(Verdict.PASS if is_idle or is_new else Verdict.UNKNOWN, "no batch has completed yet")
    reporting = reporting_lag(facts.sources)
    if not reporting:
        return finding(Verdict.PASS, "not applicable: files and generated rows report no backlog")
    behind = lag(reporting)
    if behind is None:
        return finding(Verdict.UNKNOWN, "the sources do not report their backlog")
    figures: _Figures = {"records_behind": behind}
    largest = largest_lag(reporting)
    where = ""
    if largest is not None:
        figures |= {"slowest_partition": largest[0], "slowest_partition_behind": largest[1]}
        where = f" ({largest[1]:,} of them in {largest[0]})"
    if not behind:
        return finding(Verdict.PASS, "the sources have no unread records", figures)
    if not facts.rows_per_second:
        return finding(
            Verdict.UNKNOWN, f"{behind:,} records are waiting{where}, and the speed of the query is unknown", figures
        )
    catch_up_ms = round(behind / facts.rows_per_second * 1000)
    figures["catch_up_ms"] = catch_up_ms
    message = f"{behind:,} records are waiting{where}, {rounded_duration(catch_up_ms)} at the speed of the last batch"
    return finding(Verdict.WARN if catch_up_ms > settings.max_catch_up_ms else Verdict.PASS, message, figures)


def source_retention(facts: HealthFacts, settings: HealthSettings, *, now_ms: int) -> Finding:
    finding = partial(Finding, HealthCheck.SOURCE_RETENTION)
    if facts.newest is None:
        return finding(Verdict.PASS, "there is no snapshot yet that a recovery would start from")
    if not facts.sources:
        return finding(Verdict.UNKNOWN, "no batch has reported the sources")
    so_far, messages = Verdict.PASS, []
    for source in facts.sources:
        left = retention(
            source,
            restore_point_at_ms=facts.newest.created_at_ms,
            now_ms=now_ms,
            retention_ms=settings.source_retention_ms,
            file_max_age_ms=settings.file_max_age_ms,
        )
        if left.is_gone:
            verdict = Verdict.ERROR
        elif left.is_unlimited:
            verdict = Verdict.PASS
        elif left.left_ms is None:
            verdict = Verdict.UNKNOWN
        else:
            verdict = Verdict.WARN if left.left_ms <= settings.retention_margin_ms else Verdict.PASS
        so_far = max(so_far, verdict, key=_WORSE.index)
        waiting = sum(facts.newest.lags.values()) if source.topics and left.left_ms else 0
        older = f", older ones for less: {waiting:,} were waiting to be read at it" if waiting else ""
        messages.append(f"{source.name}: {left.message}{older}")
    return finding(so_far, "; ".join(messages), {"restore_point": describe_snapshot(facts.newest)})


def event_time(facts: HealthFacts, settings: HealthSettings, *, now_ms: int) -> Finding:
    """Warn if the watermark is ahead of the clock, which makes every later event a late one, or cannot be read."""
    finding = partial(Finding, HealthCheck.EVENT_TIME)
    if facts.unreadable_watermark is not None:
        return finding(
            Verdict.WARN,
            f"its watermark is {headline(facts.unreadable_watermark)!r}, which cannot be read as a time: examine the "
            "event times of the input",
        )
    newest_ms = facts.newest.watermark_ms if facts.newest is not None else None
    watermark_ms = facts.watermark_ms if facts.watermark_ms is not None else newest_ms
    if watermark_ms is None:
        return finding(Verdict.PASS, "no watermark was reported")
    if watermark_ms <= now_ms + settings.max_watermark_ahead_ms:
        return finding(Verdict.PASS, f"its watermark is {utc_time(watermark_ms)}")
    return finding(
        Verdict.WARN,
        f"its watermark is {utc_time(watermark_ms)}, ahead of the clock: an event with a wrong time has moved it, and "
        "every event before it is dropped as late. Filter such events in the code, and start from a snapshot from "
        "before it",
    )


def desired_state(facts: HealthFacts) -> Finding:
    finding = partial(Finding, HealthCheck.DESIRED_STATE)
    row = facts.desired
    if row is None:
        return finding(Verdict.PASS, "the stream is not managed: it is started and stopped by hand")
    if row.broken is not None:
        return finding(
            Verdict.ERROR, f"it is no longer managed, because its desired state cannot be read: {row.broken}"
        )
    upgrade = row.upgrade
    figures: _Figures = (
        {} if upgrade is None else {"upgrade_phase": upgrade.phase.value, "to_version": upgrade.to_version or ""}
    )
    if upgrade is not None and upgrade.phase.refuses:
        runs_on = upgrade.phase is UpgradePhase.REFUSED and facts.running_since_ms is not None
        if runs_on and facts.loaded_version is not None and facts.loaded_version == upgrade.from_version:
            message = f"version {upgrade.to_version} was refused, and is no longer loaded: {upgrade.reason}"
            return finding(Verdict.PASS, message, figures)
        message = f"the upgrade to {upgrade.to_version} ended {upgrade.phase.value}: {upgrade.reason}. "
        message += "The stream continues with the previous code" if runs_on else "The stream is not running"
        message += "; load another code version, run set_desired_state_job with retry_refused, or start it by hand"
        return finding(Verdict.WARN if runs_on else Verdict.ERROR, message, figures)
    if row.alert is not None:
        return finding(Verdict.ERROR, row.alert, figures)
    if upgrade is not None and not upgrade.phase.is_over:
        return finding(Verdict.PASS, f"an upgrade is in progress: {upgrade.phase.value}, {upgrade.reason}", figures)
    return finding(Verdict.PASS, "no action is required", figures)


_WORSE = (Verdict.PASS, Verdict.UNKNOWN, Verdict.WARN, Verdict.ERROR)
