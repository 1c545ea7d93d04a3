"""What the catalog records: frozen values, and the states they can be in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dagster_ckpt.catalog.recovery_records import StateOrigin


class StartCause(StrEnum):
    """Who began an execution."""

    MANUAL = "MANUAL"
    RESTART_IN_PLACE = "RESTART_IN_PLACE"
    RESTART_NEW_RUN = "RESTART_NEW_RUN"
    UNKNOWN = "UNKNOWN"


class ExecutionStatus(StrEnum):
    """Where an execution is: STARTING → RUNNING → one of the others.

    BROKEN is never stored: it is what a row that cannot be read is listed as.
    """

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    CANCELED = "CANCELED"
    FAILED = "FAILED"
    SUSPENDED = "SUSPENDED"
    BROKEN = "BROKEN"


class SnapshotStatus(StrEnum):
    """Where a snapshot is: IN_PROGRESS → COMPLETED or FAILED; COMPLETED → DELETING → DELETED.

    BROKEN is never stored: it is what a row that cannot be read is listed as.
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
    UNKNOWN = "UNKNOWN"


class HoldKind(StrEnum):
    """Why a snapshot is held.

    USE: Somebody reads it; the hold runs out unless its reader renews it.
    TAG: A person keeps it, until the tag is released.
    REFERENCE: Something that is not over names it: a request, a restore, an upgrade.
    """

    USE = "USE"
    TAG = "TAG"
    REFERENCE = "REFERENCE"


class RequestKind(StrEnum):
    """What is asked of a stream."""

    CHECKPOINT = "CHECKPOINT"
    SAVEPOINT = "SAVEPOINT"
    STOP_WITH_SAVEPOINT = "STOP_WITH_SAVEPOINT"
    CANCEL = "CANCEL"
    SUSPEND = "SUSPEND"
    START = "START"
    UNKNOWN = "UNKNOWN"


class RequestStatus(StrEnum):
    """Where a request is: PENDING → ACCEPTED → COMPLETED or FAILED; PENDING or ACCEPTED → WITHDRAWN.

    BROKEN is never stored: it is what a row that cannot be read is listed as.
    """

    PENDING = "PENDING"
    ACCEPTED = "ACCEPTED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    WITHDRAWN = "WITHDRAWN"
    BROKEN = "BROKEN"


class EventType(StrEnum):
    """What the event outbox tells of."""

    EXECUTION_STARTED = "EXECUTION_STARTED"
    EXECUTION_RUNNING = "EXECUTION_RUNNING"
    EXECUTION_ENDED = "EXECUTION_ENDED"
    GAVE_UP = "GAVE_UP"
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
        options: What operators want to see of its options.
        live_directory: Spark's checkpoint location now, or None before the first start and after a cancellation
            that deleted it.
        live_generation: Number of that directory; rises with each new one.
        timeline: Rises with each rewind or restore; snapshots of an earlier one are not recovered from by themselves.
        restored_snapshot_id: The snapshot the timeline began with.
        preferred_savepoint_id: What `preferred-savepoint` means.
        pending_restore: A restore whose sinks are still to be rolled back.
        next_number: Number of the next attempt.
        plan: What the state in the live directory is kept for, as the query that was started last has it; None or
            empty where that is not known.
        accepted_plan: Fingerprint of another plan that a person lets go on from that state.
        origin: Where the state in the live directory came from, or None where that is not known.
        broken: Why the row could not be read as it is, or None.
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
    pending_restore: dict[str, Any] | None
    next_number: int
    created_at_ms: int
    updated_at_ms: int
    plan: dict[str, Any] | None = None
    accepted_plan: str | None = None
    origin: StateOrigin | None = None
    broken: str | None = None


@dataclass(frozen=True)
class ExecutionRecord:
    """One attempt to run a stream.

    Attributes:
        settled: Whether nothing is left to do for it: restarted, or its retention applied.
        recovery: What it started from.
        progress: The newest figures of its query.
        code_version: Version of the code that it runs, as its owner names it.
        application: The Spark application it runs in: its `id`, `master`, and `page` where it has one.
        boot_id: The boot of its machine.
        process_start_ticks: When the kernel says that its process started.
        broken: Why the row could not be read as it is, or None.
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
    """Who asks for a lease: enough to prove later that it has ended."""

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
    """Who is the one writer of a stream.

    Attributes:
        token: Rises with each change of holder; an older one is worth nothing.
        expired: Whether it had run out on the database's clock when it was read.
        predecessor_unproven: Whether a holder before may still write, and its query is not fenced off yet.
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


@dataclass(frozen=True)
class SnapshotRecord:
    """A checkpoint or savepoint.

    Attributes:
        kind: "CHECKPOINT" or "SAVEPOINT".
        number: Number of the attempt; the n of `chk-<n>`.
        location: URL of its folder, once completed.
        full_bytes: Bytes a restore reads.
        incremental_bytes: Bytes that were written for it.
        rows: Input rows since the snapshot before, as far as its execution saw them.
        duration_ms: From the attempt's begin to its completion.
        label: A person's name for a savepoint.
        claimed: Whether a start has claimed it: the stream owns it and deletes it as it does a checkpoint.
        schedule: Name of the schedule that took it, or None: nobody's history but that schedule's deletes it.
        verified_at_ms: When its bytes and its completeness were last verified, or None.
        verified_problem: What that verification found; None where it can be restored, or was never verified.
        broken: Why the row could not be read as it is, or None.
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

    @property
    def plan(self) -> dict[str, Any]:
        """What its state is kept for; empty where that is not known."""
        plan = self.properties.get("plan")
        return plan if isinstance(plan, dict) else {}


@dataclass(frozen=True)
class CompletedSnapshot:
    """What is known of a snapshot once it is whole in storage; see `SnapshotRecord` for each."""

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
    """What keeps a snapshot from being deleted.

    Attributes:
        stream_id: The stream of the snapshot.
        holder: Who holds it, for a person.
        request_id: The request whose answer ends it, for a REFERENCE that is one.
        expires_at_ms: When it runs out unless it is renewed, for USE.
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
class RunFailure:
    """An execution that failed.

    Attributes:
        at_ms: When it ended, ms since the epoch.
        reason: Why.
    """

    at_ms: int
    reason: str


@dataclass(frozen=True)
class SnapshotTally:
    """What several checkpoints amount to.

    Attributes:
        count: How many.
        rows: Input rows, as far as their executions saw them.
        incremental_bytes: Bytes that were written for them.
    """

    count: int
    rows: int
    incremental_bytes: int


@dataclass(frozen=True)
class SnapshotHistory:
    """What the snapshots of a stream tell of its health.

    Attributes:
        newest: The newest restorable snapshot.
        verified: The snapshot that was verified last; its bytes may be gone by now.
        failures: Attempts that failed since the newest snapshot.
        last_failure: Why the last of them failed.
        bytes_before: Full bytes of the first snapshot in the window that was asked for.
    """

    newest: SnapshotRecord | None = None
    verified: SnapshotRecord | None = None
    failures: int = 0
    last_failure: str | None = None
    bytes_before: int | None = None


@dataclass(frozen=True)
class RequestRecord:
    """Something that was asked of a stream, and its answer.

    Attributes:
        broken: Why the row could not be read as it is, or None.
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
    """A driver that was launched and goes on without its launcher.

    Attributes:
        request_id: The START request it answers.
        run_id: The run that launched it.
        host: Where its process was started: that of the driver, or of a submission that hands it to a cluster.
        boot_id: The boot of that machine.
        pid: That process.
        process_start_ticks: When the kernel says that it started, to tell it from a later one with the same number.
        command: Its command line.
        log: File with everything it prints.
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
    """Something that happened, in the order in which it was committed."""

    sequence: int
    stream_id: str
    type: EventType
    snapshot_id: str | None
    execution_id: str | None
    payload: dict[str, Any]
    at_ms: int
