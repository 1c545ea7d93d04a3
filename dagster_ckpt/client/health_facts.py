"""Collects the facts that health checks judge, of many streams in few queries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import DesiredRecord, UpgradePhase
from dagster_ckpt.catalog.history import SnapshotHistory
from dagster_ckpt.catalog.journal import PointFailure
from dagster_ckpt.catalog.records import (
    SOURCE_IDENTITIES,
    ExecutionRecord,
    ExecutionStatus,
    SnapshotRecord,
    unreadable_watermark,
    watermark_ms_of,
)
from dagster_ckpt.errors import OptionError
from dagster_ckpt.recovery.recovery_points import failed_points, snapshot_point
from dagster_ckpt.recovery.source_check import topic_offsets
from dagster_ckpt.runtime.stall import QueryInactivity
from dagster_ckpt.spark.query.sources import RETENTION_MS, identities_of_record
from dagster_ckpt.stream.liveness import LIVELY_MS
from dagster_ckpt.values.durations import rounded_duration, utc_time
from dagster_ckpt.values.modes import DesiredState
from dagster_ckpt.values.validation import conform_fields

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@dataclass(frozen=True)
class HealthSettings:
    """Thresholds of the health checks.

    `max_checkpoint_age_ms` None is the rule of the Flink Kubernetes Operator; with periodic checkpoints off, any age
    passes.

    Raises:
        OptionError: A threshold is too low, or warns after it fails.

    Example:
        >>> HealthSettings(max_checkpoint_age_ms=10 * 60_000, failures_to_fail=5)
    """

    max_checkpoint_age_ms: Annotated[
        int | None,
        "Recovery point objective: maximum age of the newest snapshot; half of it warns. Default: "
        "max(interval, timeout) x (tolerable failures + 2), and it warns after (tolerable failures + 2) "
        "intervals plus the slowest of the last checkpoints.",
    ] = None
    failures_to_warn: Annotated[int, "Number of consecutive failed checkpoints that cause a warning."] = 1
    failures_to_fail: Annotated[int, "Number of consecutive failed checkpoints that cause an error."] = 3
    max_verification_age_ms: Annotated[
        int,
        "Maximum age of the last verification of a snapshot. Default: two days.",
    ] = 2 * DAY_MS
    size_growth_factor: Annotated[
        float,
        "Warn if a snapshot has grown by this factor since the start of the window.",
    ] = 2.0
    size_window_ms: Annotated[int, "Length of the window for size_growth_factor. Default: a day."] = DAY_MS
    size_floor_bytes: Annotated[
        int,
        "Snapshots smaller than this are not checked for growth. Default: 64 MiB.",
    ] = 64 * 1024 * 1024
    max_snapshot_bytes: Annotated[
        int | None,
        "Maximum size of a snapshot; a larger one is an error. Default: no limit.",
    ] = None
    max_stall_ms: Annotated[
        int,
        "Time without progress after which a query that is not idle is an error, or a warning while "
        "tasks of its batch are running. Default: ten minutes.",
    ] = 10 * 60_000
    loop_failures: Annotated[
        int,
        "Number of failed runs, within loop_window_ms and since the newest snapshot, that count as a "
        "restart loop: an error.",
    ] = 3
    loop_window_ms: Annotated[int, "Length of the window for loop_failures. Default: an hour."] = HOUR_MS
    max_catch_up_ms: Annotated[
        int,
        "Source lag: warn if processing the backlog at the speed of the last batch takes longer than "
        "this. Default: ten minutes.",
    ] = 10 * 60_000
    source_retention_ms: Annotated[
        int | None,
        "Retention of sources that do not report it, as a Kafka topic that is also limited by size. Default: "
        "retention.ms of the topics when the query started.",
    ] = None
    file_max_age_ms: Annotated[
        int,
        "maxFileAge of file sources: older files are not read again. Default: seven days.",
    ] = 7 * DAY_MS
    retention_margin_ms: Annotated[
        int,
        "Warn if records that a recovery would re-read leave the sources' retention within this time. "
        "Default: six hours.",
    ] = 6 * HOUR_MS
    max_watermark_ahead_ms: Annotated[
        int,
        "Warn if the watermark is further ahead of the clock. Default: one day.",
    ] = DAY_MS

    def __post_init__(self) -> None:
        conform_fields(self)
        for name, value in vars(self).items():
            if value is not None and value < 0:
                raise OptionError(f"HealthSettings: {name} is {value}, but must be 0 or more.")
        if self.loop_failures < 1:
            raise OptionError(f"HealthSettings: loop_failures is {self.loop_failures}, but must be at least 1.")
        if not 1 <= self.failures_to_warn <= self.failures_to_fail:
            raise OptionError(
                f"HealthSettings: failures_to_warn is {self.failures_to_warn} and failures_to_fail is "
                f"{self.failures_to_fail}. Both must be 1 or more, and failures_to_warn at most failures_to_fail."
            )


# As Kafka writes it in `retention.ms`.
UNLIMITED_MS = -1


class SourceKind(Enum):
    KAFKA = "KAFKA"
    FILES = "FILES"
    GENERATED = "GENERATED"
    OTHER = "OTHER"


_KINDS = (
    ("Kafka", SourceKind.KAFKA),
    ("FileStreamSource", SourceKind.FILES),
    ("Rate", SourceKind.GENERATED),
)


@dataclass(frozen=True)
class SourceFacts:
    """What is known of one source.

    Attributes:
        name: Spark's name, such as `KafkaV2[Subscribe[orders]]`.
        behind: Waiting records; None if not reported.
        topics: Those that the newest batch has read.
        retention_ms: The shortest of its topics; -1: unlimited, None: unknown.
    """

    name: str
    behind: int | None = None
    topics: Sequence[str] = ()
    lags: Mapping[str, int] = field(default_factory=dict)
    retention_ms: int | None = None

    @property
    def kind(self) -> SourceKind:
        return next((kind for begin, kind in _KINDS if self.name.startswith(begin)), SourceKind.OTHER)


@dataclass(frozen=True)
class Retention:
    """Result of `retention`; `left_ms` is None if it is unknown."""

    message: str
    is_gone: bool = False
    is_unlimited: bool = False
    left_ms: int | None = None


def sources_of(progress: Mapping[str, Any], retained_ms: Mapping[str, int] | None = None) -> list[SourceFacts] | None:
    """Return the sources that a query has reported, with the retention of their topics."""
    reported = progress.get("sources")
    if not isinstance(reported, list) or not reported:
        return None
    found = []
    for each in reported:
        if isinstance(each, dict):
            topics = tuple(topic_offsets(each.get("read_up_to")) or ())
            lags, shortest = _lags(each.get("lags")), _shortest([(retained_ms or {}).get(topic) for topic in topics])
            found.append(SourceFacts(str(each.get("source")), each.get("behind"), topics, lags, shortest))
    return found


def _shortest(retained_ms: Sequence[int | None]) -> int | None:
    known = [each for each in retained_ms if each is not None]
    if not known or len(known) < len(retained_ms):
        return None
    return min((each for each in known if each != UNLIMITED_MS), default=UNLIMITED_MS)


def _retained_ms(execution: ExecutionRecord | None) -> dict[str, int]:
    recorded = ((execution.recovery if execution is not None else None) or {}).get(SOURCE_IDENTITIES)
    # Two clusters may have a topic of the same name.
    found: defaultdict[str, list[int | None]] = defaultdict(list)
    for identity in identities_of_record(recorded) or ():
        for topic in identity.topics:
            text = identity.identity.get(f"{RETENTION_MS}{topic}", "")
            found[topic].append(int(text) if text.lstrip("-").isdecimal() else None)
    return {topic: shortest for topic, each in found.items() if (shortest := _shortest(each)) is not None}


def _lags(reported: object) -> dict[str, int]:
    if not isinstance(reported, dict):
        return {}
    return {str(name): behind for name, behind in reported.items() if type(behind) is int}


def largest_lag(sources: Sequence[SourceFacts]) -> tuple[str, int] | None:
    lags = [each for source in sources for each in source.lags.items()]
    name, behind = max(lags, key=lambda each: each[1], default=("", 0))
    return (name, behind) if len(lags) > 1 and behind else None


def reporting_lag(sources: Sequence[SourceFacts]) -> list[SourceFacts]:
    silent = (SourceKind.FILES, SourceKind.GENERATED)
    return [source for source in sources if source.behind is not None or source.kind not in silent]


def lag(sources: Sequence[SourceFacts]) -> int | None:
    if any(source.behind is None for source in sources):
        return None
    return sum(source.behind or 0 for source in sources)


def retention(
    source: SourceFacts,
    *,
    restore_point_at_ms: int,
    now_ms: int,
    retention_ms: int | None,
    file_max_age_ms: int,
) -> Retention:
    """Judge whether a source still retains what a recovery would re-read: its records since `restore_point_at_ms`."""
    if source.kind is SourceKind.GENERATED:
        return Retention("generates its rows again", is_unlimited=True)
    if retention_ms is None:
        retention_ms = file_max_age_ms if source.kind is SourceKind.FILES else source.retention_ms
    if retention_ms is None:
        return Retention("its retention is unknown: set source_retention_ms")
    if retention_ms == UNLIMITED_MS:
        return Retention("retains all records", is_unlimited=True)
    until_ms = restore_point_at_ms + retention_ms
    if until_ms <= now_ms:
        message = (
            f"no longer has every record since the restore point: it retains them for {rounded_duration(retention_ms)}"
        )
        return Retention(message, is_gone=True, left_ms=0)
    return Retention(
        f"retains the records since the restore point until {utc_time(until_ms)}", left_ms=until_ms - now_ms
    )


@dataclass(frozen=True)
class HealthFacts(SnapshotHistory):
    """What the catalog knows of a stream besides its snapshots; None: unknown, or nothing.

    Attributes:
        down: Why it is not running although it should.
        failed_runs: Those within `loop_window_ms` and since the newest snapshot.
        unrestorable: Why a recovery from `newest` failed.
    """

    running_since_ms: int | None = None
    sources: Sequence[SourceFacts] | None = None
    rows_per_second: float | None = None
    desired: DesiredRecord | None = None
    loaded_version: str | None = None
    heartbeat_at_ms: int | None = None
    process: str | None = None
    inactivity: QueryInactivity | None = None
    down: str | None = None
    down_since_ms: int | None = None
    failed_runs: int = 0
    last_end: str | None = None
    unrestorable: str | None = None
    watermark_ms: int | None = None
    unreadable_watermark: str | None = None

    @property
    def was_never_started(self) -> bool:
        return self.process is None and self.newest is None


def health_facts(catalog: Catalog, settings: Mapping[str, HealthSettings], *, now_ms: int) -> dict[str, HealthFacts]:
    stream_ids: Sequence[str] = list(settings)
    executions = catalog.executions.latest_of(stream_ids)
    windows = {stream_id: now_ms - each.size_window_ms for stream_id, each in settings.items()}
    histories = catalog.history.of_streams(windows)
    desired = catalog.desired_states.of(stream_ids)
    since_ms = now_ms - max((each.loop_window_ms for each in settings.values()), default=0)
    failed = catalog.executions.failed_since(stream_ids, since_ms)
    recoveries = catalog.recoveries.of_streams(stream_ids)
    facts = {}
    for stream_id in stream_ids:
        execution, history = executions.get(stream_id), histories[stream_id]
        progress = (execution.progress if execution is not None else None) or {}
        speed = progress.get("rows_per_second")
        watermark = str(progress.get("watermark") or "")
        after_ms = max(now_ms - settings[stream_id].loop_window_ms, _completed_at_ms(history.newest))
        failed_runs = [end for end in failed.get(stream_id, ()) if end.at_ms > after_ms]
        silent = _why_silent(catalog, execution, now_ms)
        facts[stream_id] = HealthFacts(
            **vars(history),
            running_since_ms=_running_since_ms(execution) if silent is None else None,
            sources=sources_of(progress, _retained_ms(execution)),
            rows_per_second=speed if isinstance(speed, int | float) else None,
            desired=desired.get(stream_id),
            heartbeat_at_ms=_heartbeat_at_ms(execution),
            process=f"process {execution.pid} on {execution.host}" if execution is not None else None,
            down=silent or _why_down(execution, desired.get(stream_id)),
            down_since_ms=_down_since_ms(execution),
            failed_runs=len(failed_runs),
            last_end=failed_runs[-1].reason if failed_runs else None,
            unrestorable=_why_unrestorable(history.newest, recoveries.get(stream_id, ())),
            watermark_ms=watermark_ms_of(watermark),
            unreadable_watermark=unreadable_watermark(
                watermark or (history.newest.watermark if history.newest is not None else None)
            ),
            inactivity=QueryInactivity.of_record(progress.get("activity")),
        )
    return facts


def _completed_at_ms(snapshot: SnapshotRecord | None) -> int:
    return (snapshot.completed_at_ms or 0) if snapshot is not None else 0


def _why_unrestorable(newest: SnapshotRecord | None, failures: Sequence[PointFailure]) -> str | None:
    return None if newest is None else failed_points(failures).get(snapshot_point(newest.snapshot_id))


def _running_since_ms(execution: ExecutionRecord | None) -> int | None:
    return execution.started_at_ms if execution is not None and not execution.status.is_over else None


_TO_START = (UpgradePhase.STARTING, UpgradePhase.RESTORING)


def _why_down(execution: ExecutionRecord | None, desired: DesiredRecord | None) -> str | None:
    if execution is not None and not execution.status.is_over:
        return None
    if execution is not None and execution.status is ExecutionStatus.FAILED:
        # Each check shows this; the other lines of Spark's errors are advice and a trace.
        first, _, _ = (execution.reason or "").partition("\n")
        return f"its last run failed: {first}"
    if desired is not None and desired.desired is DesiredState.RUNNING:
        return "its desired state is RUNNING"
    if desired is not None and desired.upgrade is not None and desired.upgrade.phase in _TO_START:
        return f"an upgrade is to start it ({desired.upgrade.phase.value})"
    return None


def _why_silent(catalog: Catalog, execution: ExecutionRecord | None, now_ms: int) -> str | None:
    if execution is None or execution.status.is_over or now_ms - execution.heartbeat_at_ms <= LIVELY_MS:
        return None
    lease = catalog.leases.current(execution.stream_id)
    # A restore, which may take hours, sends no heartbeat but renews the lease.
    if lease is not None and lease.execution_id == execution.execution_id and not lease.expired:
        return None
    return (
        f"process {execution.pid} on {execution.host} has sent no heartbeat since "
        f"{utc_time(execution.heartbeat_at_ms)} and lost its lease: it has ended, or it hangs"
    )


def _down_since_ms(execution: ExecutionRecord | None) -> int | None:
    if execution is None:
        return None
    return execution.ended_at_ms if execution.status.is_over else execution.heartbeat_at_ms


def _heartbeat_at_ms(execution: ExecutionRecord | None) -> int | None:
    is_running = execution is not None and execution.status is ExecutionStatus.RUNNING
    return execution.heartbeat_at_ms if execution is not None and is_running else None
