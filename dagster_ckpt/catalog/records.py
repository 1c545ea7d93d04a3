"""Records of the catalog: frozen values and their status enums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from dagster_ckpt.catalog.pending_restore import PendingRestore
from dagster_ckpt.catalog.state_origin import StateOrigin
from dagster_ckpt.values.untrusted import LARGEST_LONG


class StartCause(StrEnum):
    """Who started an execution."""

    MANUAL = "MANUAL"
    RESTART_IN_PLACE = "RESTART_IN_PLACE"
    RESTART_NEW_RUN = "RESTART_NEW_RUN"
    UNKNOWN = "UNKNOWN"


class ExecutionStatus(StrEnum):
    """Status of an execution: STARTING → RUNNING → one of the others.

    BROKEN is never stored: it is the status of a row that cannot be read.
    """

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    CANCELED = "CANCELED"
    FAILED = "FAILED"
    SUSPENDED = "SUSPENDED"
    BROKEN = "BROKEN"


class SnapshotStatus(StrEnum):
    """Status of a snapshot: IN_PROGRESS → COMPLETED or FAILED; COMPLETED → DELETING → DELETED.

    BROKEN is never stored: it is the status of a row that cannot be read.
    """

    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    DELETING = "DELETING"
    DELETED = "DELETED"
    BROKEN = "BROKEN"


class SnapshotTrigger(StrEnum):
    """Why a snapshot was taken."""

    PERIODIC = "PERIODIC"
    MANUAL = "MANUAL"
    STOP = "STOP"
    REWIND = "REWIND"
    EDIT = "EDIT"
    UNKNOWN = "UNKNOWN"


# In the recovery of an execution and in the properties of a snapshot: what the sources of the query read.
SOURCE_IDENTITIES = "source_identities"
# In the recovery of an execution: runs of its stream are launched by a supervisor, also while its query runs.
IS_LAUNCHED = "is_launched"
# In the arguments of a START request: its run checks its code first, and then suspends the query that runs.
HANDS_OVER = "hands_over"


class HoldKind(StrEnum):
    """Why a snapshot is held.

    USE: A process reads it; the hold expires unless the reader renews it.
    TAG: A user keeps it until the tag is released.
    REFERENCE: An unfinished request, restore or upgrade refers to it.
    """

    USE = "USE"
    TAG = "TAG"
    REFERENCE = "REFERENCE"


class RequestKind(StrEnum):
    """What a request asks of a stream."""

    CHECKPOINT = "CHECKPOINT"
    SAVEPOINT = "SAVEPOINT"
    STOP_WITH_SAVEPOINT = "STOP_WITH_SAVEPOINT"
    CANCEL = "CANCEL"
    SUSPEND = "SUSPEND"
    START = "START"
    UNKNOWN = "UNKNOWN"


class RequestStatus(StrEnum):
    """Status of a request: PENDING → ACCEPTED → COMPLETED or FAILED; PENDING or ACCEPTED → WITHDRAWN.

    BROKEN is never stored: it is the status of a row that cannot be read.
    """

    PENDING = "PENDING"
    ACCEPTED = "ACCEPTED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    WITHDRAWN = "WITHDRAWN"
    BROKEN = "BROKEN"


class EventType(StrEnum):
    """Types of events in the outbox."""

    EXECUTION_STARTED = "EXECUTION_STARTED"
    EXECUTION_RUNNING = "EXECUTION_RUNNING"
    EXECUTION_ENDED = "EXECUTION_ENDED"
    TERMINALLY_FAILED = "TERMINALLY_FAILED"
    CHECKPOINT_COMPLETED = "CHECKPOINT_COMPLETED"
    CHECKPOINT_FAILED = "CHECKPOINT_FAILED"
    SAVEPOINT_COMPLETED = "SAVEPOINT_COMPLETED"
    SAVEPOINT_FAILED = "SAVEPOINT_FAILED"
    SNAPSHOT_DELETED = "SNAPSHOT_DELETED"
    RESTORED = "RESTORED"
    RECOVERY_FAILED = "RECOVERY_FAILED"
    LEASE_TAKEN_OVER = "LEASE_TAKEN_OVER"
    REQUEST_RESOLVED = "REQUEST_RESOLVED"
    DESIRED_STATE_SET = "DESIRED_STATE_SET"
    UPGRADE_CHANGED = "UPGRADE_CHANGED"
    ALERT = "ALERT"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class StreamRecord:
    """A stream.

    Attributes:
        stream_id: Stable id.
        name: Name of its query.
        asset_key: Dagster asset key as a user string.
        options: Its options, for display.
        live_directory: Spark's current checkpoint location, or None before the first start and
            after a cancellation that deleted it.
        live_generation: Number of that directory; increases with each new one.
        timeline: Increases with each rewind or restore; automatic recovery does not use snapshots
            that an earlier timeline took after the branch.
        restored_snapshot_id: The snapshot that the timeline began with.
        preferred_savepoint_id: The savepoint that `preferred-savepoint` resolves to.
        pending_restore: What remains to be done before its query may start.
        next_number: Number of the next attempt.
        plan: The plan that the state in the live directory belongs to, from the last started query;
            None or empty if unknown.
        accepted_plan: Fingerprint of another plan that a user allowed to continue from that state.
        origin: Where the state in the live directory came from, or None if unknown.
        state_edits: Ids of the edits that this state contains, oldest first.
        broken: Why the row could not be fully read, or None.
    """

    stream_id: str
    name: str
    asset_key: str
    options: dict[str, Any]
    live_directory: str | None
    live_generation: int
    timeline: int
    restored_snapshot_id: str | None
    preferred_savepoint_id: str | None
    pending_restore: PendingRestore | None
    next_number: int
    created_at_ms: int
    updated_at_ms: int
    plan: dict[str, Any] | None = None
    accepted_plan: str | None = None
    origin: StateOrigin | None = None
    state_edits: tuple[str, ...] = ()
    broken: str | None = None


@dataclass(frozen=True)
class ExecutionRecord:
    """One attempt to run a stream.

    Attributes:
        settled: Whether it needs no further work: it was restarted, or its retention was applied.
        recovery: What it started from.
        progress: The newest progress of its query.
        code_version: Version of the code that it runs, as configured.
        application: The Spark application in which it runs: its `id`, `master`, and `page` if it
            has one.
        boot_id: Boot id of its machine.
        process_start_ticks: Start time of its process as the kernel reports it.
        broken: Why the row could not be fully read, or None.
    """

    execution_id: str
    stream_id: str
    run_id: str
    cause: StartCause
    status: ExecutionStatus
    settled: bool
    host: str
    pid: int
    started_at_ms: int
    ended_at_ms: int | None
    reason: str | None
    recovery: dict[str, Any] | None
    live_directory: str | None
    progress: dict[str, Any] | None
    heartbeat_at_ms: int
    code_version: str | None = None
    application: dict[str, Any] | None = None
    boot_id: str | None = None
    process_start_ticks: int | None = None
    broken: str | None = None


@dataclass(frozen=True)
class Holder:
    """Identity of a process that acquires a lease, with enough detail to prove later that it has ended."""

    execution_id: str
    run_id: str
    host: str
    pid: int
    process_start_ticks: int | None
    boot_id: str
    jvm_pid: int | None = None
    jvm_start_ticks: int | None = None


@dataclass(frozen=True)
class LeaseRecord:
    """The lease of a stream and its holder.

    Attributes:
        token: Increases with each change of holder; earlier tokens are invalid.
        expired: Whether it had expired by the database's clock when it was read.
        predecessor_unproven: Whether a previous holder may still write and its query has not been
            fenced yet.
    """

    stream_id: str
    execution_id: str
    run_id: str
    token: int
    host: str
    pid: int
    process_start_ticks: int | None
    boot_id: str
    jvm_pid: int | None
    jvm_start_ticks: int | None
    acquired_at_ms: int
    renewed_at_ms: int
    expires_at_ms: int
    expired: bool
    predecessor_unproven: bool = False


# Property of a snapshot in the catalog: when its state was proven.
PROVEN_AT_MS = "proven_at_ms"
# When an attempt found its position unchanged.
RENEWED_AT_MS = "renewed_at_ms"


@dataclass(frozen=True)
class SnapshotRecord:
    """A checkpoint or savepoint.

    Attributes:
        kind: "CHECKPOINT" or "SAVEPOINT".
        number: Number of the attempt; the n of `chk-<n>`.
        location: URL of its folder, once completed.
        full_bytes: Number of bytes that a restore reads.
        incremental_bytes: Number of bytes written for it.
        rows: Input rows since the previous snapshot, as far as its execution saw them.
        duration_ms: Time from the start of the attempt to its completion.
        label: Name that a user gave it.
        claimed: Whether a start has claimed it: the stream owns it and deletes it like a
            checkpoint.
        schedule: Name of the schedule that took it, or None. Only that schedule's history deletes
            it.
        verified_at_ms: When its bytes and completeness were last verified, or None.
        verified_problem: The problem that verification found; None if it can be restored or was
            never verified.
        broken: Why the row could not be fully read, or None.
    """

    snapshot_id: str
    stream_id: str
    execution_id: str | None
    kind: str
    number: int | None
    status: SnapshotStatus
    trigger: SnapshotTrigger
    timeline: int
    location: str | None = None
    batch_id: int | None = None
    query_id: str | None = None
    full_bytes: int | None = None
    incremental_bytes: int | None = None
    file_count: int | None = None
    rows: int | None = None
    state_rows: int | None = None
    watermark: str | None = None
    duration_ms: int | None = None
    label: str | None = None
    request_id: str | None = None
    properties: dict[str, Any] = field(default_factory=dict)
    failure_reason: str | None = None
    created_at_ms: int = 0
    completed_at_ms: int | None = None
    claimed: bool = False
    schedule: str | None = None
    verified_at_ms: int | None = None
    verified_problem: str | None = None
    broken: str | None = None

    def __repr__(self) -> str:
        kind = f"chk-{self.number}" if self.kind == "CHECKPOINT" else f"savepoint {self.label or self.snapshot_id}"
        sizes = {"": self.full_bytes, " new": self.incremental_bytes}
        known = [f"{size / 1e6:,.1f} MB{what}" for what, size in sizes.items() if size is not None]
        facts = ", ".join([f"{kind} of {self.stream_id} at batch {self.batch_id}", self.status.value, *known])
        return f"SnapshotRecord({facts})"

    @property
    def is_renewed(self) -> bool:
        """Whether the last attempt found its position unchanged, and wrote nothing."""
        return RENEWED_AT_MS in self.properties

    @property
    def is_proven(self) -> bool:
        """Whether something has loaded its state from storage with success.

        A query that resumed from it, or from the live directory at its position, has committed a batch; or
        a verification has read its state with Spark. A snapshot that a later check found broken is not
        proven. False for one of an older version until one of these happens.
        """
        return self.verified_problem is None and PROVEN_AT_MS in self.properties

    @property
    def plan(self) -> dict[str, Any]:
        """The plan that its state belongs to; empty if unknown."""
        plan = self.properties.get("plan")
        return plan if isinstance(plan, dict) else {}

    @property
    def state_edits(self) -> tuple[str, ...]:
        """Ids of the edits that its state contains, oldest first."""
        edits = self.properties.get("state_edits")
        return tuple(map(str, edits)) if isinstance(edits, list) else ()

    @property
    def edit(self) -> dict[str, Any]:
        """Who edited its state, why, and the id of the edit; empty if it is not an edited savepoint."""
        edit = self.properties.get("edit")
        return edit if isinstance(edit, dict) else {}

    @property
    def lags(self) -> dict[str, int]:
        """Records that waited in each partition of the Kafka sources; empty if none was reported."""
        return lags_in(self.properties)

    @property
    def watermark_ms(self) -> int | None:
        """The watermark in ms since the epoch; None without one."""
        return watermark_ms_of(self.watermark)


def watermark_ms_of(watermark: str | None) -> int | None:
    """A watermark as Spark reports it, in ms since the epoch; None if there is none, or it cannot be read."""
    try:
        # A query has no watermark before its first rows: Spark then reports 1970.
        return round(datetime.fromisoformat(watermark).timestamp() * 1000) or None if watermark else None
    except ValueError:
        return None


def lags_in(properties: Mapping[str, Any]) -> dict[str, int]:
    """Records that waited in each partition of the Kafka sources, as a snapshot's properties record them."""
    lags = properties.get("records_behind")
    if not isinstance(lags, dict):
        return {}
    return {str(name): behind for name, behind in lags.items() if type(behind) is int}


def records_behind_in(properties: Mapping[str, Any]) -> int | None:
    """Records that waited in all Kafka sources together; None if they reported none."""
    lags = lags_in(properties)
    return min(sum(lags.values()), LARGEST_LONG) if lags else None


@dataclass(frozen=True)
class CompletedSnapshot:
    """Facts about a snapshot once it is complete in storage; see `SnapshotRecord` for each."""

    location: str
    batch_id: int | None = None
    query_id: str | None = None
    full_bytes: int | None = None
    incremental_bytes: int | None = None
    file_count: int | None = None
    rows: int | None = None
    state_rows: int | None = None
    watermark: str | None = None
    duration_ms: int | None = None
    properties: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class HoldRecord:
    """A hold that protects a snapshot from deletion.

    Attributes:
        stream_id: The stream of the snapshot.
        holder: Who holds it, as text for people.
        request_id: The request whose answer releases it, for a REFERENCE by a request.
        expires_at_ms: When it expires unless it is renewed, for USE.
    """

    hold_id: str
    snapshot_id: str
    stream_id: str
    kind: HoldKind
    holder: str
    request_id: str | None
    expires_at_ms: int | None
    created_at_ms: int


@dataclass(frozen=True)
class RequestRecord:
    """A request to a stream, and its answer.

    Attributes:
        broken: Why the row could not be fully read, or None.
    """

    request_id: str
    stream_id: str
    kind: RequestKind
    status: RequestStatus
    arguments: dict[str, Any]
    origin: str
    snapshot_id: str | None
    error: str | None
    created_at_ms: int
    resolved_at_ms: int | None
    broken: str | None = None


@dataclass(frozen=True)
class LaunchRecord:
    """A driver that runs independently of the process that launched it.

    Attributes:
        request_id: The START request that it answers.
        run_id: The run that launched it.
        host: Host of its process: the driver itself, or the submission that hands it to a cluster.
        boot_id: Boot id of that machine.
        pid: Id of that process.
        process_start_ticks: Start time of the process as the kernel reports it, which distinguishes
            it from a later process with the same id.
        command: Its command line.
        log: File with its output.
    """

    request_id: str
    stream_id: str
    run_id: str
    host: str
    boot_id: str
    pid: int
    process_start_ticks: int | None
    command: str
    log: str
    launched_at_ms: int


@dataclass(frozen=True)
class EventRecord:
    """An event of the outbox."""

    sequence: int
    stream_id: str
    type: EventType
    snapshot_id: str | None
    execution_id: str | None
    payload: dict[str, Any]
    at_ms: int


@dataclass(frozen=True)
class RunFailure:
    """An execution that failed.

    Attributes:
        at_ms: When it ended, ms since the epoch.
        reason: Why.
    """

    at_ms: int
    reason: str
