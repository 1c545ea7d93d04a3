"""Records of the catalog: frozen values and their status enums; `broken` is why a row could not be fully read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

from dagster_ckpt.catalog.pending_restore import PendingRestore
from dagster_ckpt.values.modes import SnapshotKind
from dagster_ckpt.values.safe_parsing import LARGEST_LONG


class OriginKind(StrEnum):
    """What the state in a live directory was made from.

    DIRECTORY: Another live directory, at one of its batches.
    FORK: Another stream.
    ADOPTED: A checkpoint directory of plain Spark.
    """

    EMPTY = "EMPTY"
    SNAPSHOT = "SNAPSHOT"
    DIRECTORY = "DIRECTORY"
    FORK = "FORK"
    ADOPTED = "ADOPTED"


@dataclass(frozen=True)
class StateOrigin:
    """Where the state in a live directory came from; if lost, it is re-created from here.

    Attributes:
        snapshot_id: For ADOPTED the first snapshot of the directory.
        directory: The previous live directory; for DIRECTORY and ADOPTED the one that it was made from.
        sinks: Those of the snapshot's query, as Spark names them.
        earlier: For DIRECTORY the origin of `directory`; never of kind DIRECTORY.
        map_sources: How the sources changed at `batch_id`, as the option of the start.
        source_identities: What the sources read since then, if known.
        plan: That of the query that wrote the state, if the start migrated it.
    """

    kind: OriginKind
    batch_id: int | None = None
    snapshot_id: str | None = None
    location: str | None = None
    snapshot_kind: SnapshotKind | None = None
    snapshot_number: int | None = None
    query_id: str | None = None
    directory: str | None = None
    sinks: tuple[str, ...] = ()
    earlier: StateOrigin | None = None
    map_sources: str | None = None
    source_identities: tuple[Mapping[str, Any], ...] = ()
    plan: Mapping[str, Any] | None = None

    @staticmethod
    def empty(directory: str | None) -> StateOrigin:
        return StateOrigin(OriginKind.EMPTY, directory=directory)

    @staticmethod
    def of_directory(directory: str, batch_id: int | None, before: StateOrigin | None) -> StateOrigin:
        """The origin of state made from a directory, whose own origin is `before`."""
        root = before.earlier if before is not None and before.kind is OriginKind.DIRECTORY else before
        return StateOrigin(OriginKind.DIRECTORY, batch_id=batch_id, directory=directory, earlier=root)

    def written_by(self, plan: Mapping[str, Any]) -> StateOrigin:
        """Note that a query of another plan than the present one wrote the state, also that of `earlier`."""
        earlier = self.earlier
        if earlier is not None and earlier.plan is None:
            earlier = earlier.written_by(plan)
        return replace(self, plan=plan, earlier=earlier)

    def as_record(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if value is not None}
        values["kind"] = self.kind.value
        values["sinks"] = list(self.sinks)
        del values["source_identities"]
        if self.source_identities:
            values["source_identities"] = list(self.source_identities)
        if self.earlier is not None:
            values["earlier"] = self.earlier.as_record()
        return values

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> StateOrigin:
        values = dict(record)
        earlier = values.pop("earlier", None)
        sinks = values.pop("sinks", [])
        if not isinstance(sinks, list) or not all(isinstance(sink, str) for sink in sinks):
            raise ValueError(f"sinks is {sinks!r}")
        identities = values.pop("source_identities", [])
        if not isinstance(identities, list):
            raise ValueError(f"source_identities is {identities!r}")  # noqa: TRY004 - like every unreadable record
        kind = OriginKind(values.pop("kind", None))
        if values.get("snapshot_kind") is not None:
            values["snapshot_kind"] = SnapshotKind(values["snapshot_kind"])
        for name in ("batch_id", "snapshot_number"):
            if not isinstance(values.get(name), int | None):
                raise ValueError(f"{name} is {values[name]!r}")  # noqa: TRY004 - like every other unreadable record
        try:
            before = None if earlier is None else StateOrigin.of_record(earlier)
            return StateOrigin(kind, sinks=tuple(sinks), earlier=before, source_identities=tuple(identities), **values)
        except TypeError as error:
            raise ValueError(str(error)) from error


class StartCause(StrEnum):
    MANUAL = "MANUAL"
    RESTART_IN_PLACE = "RESTART_IN_PLACE"
    RESTART_NEW_RUN = "RESTART_NEW_RUN"
    UNKNOWN = "UNKNOWN"


class ExecutionStatus(StrEnum):
    """STARTING → RUNNING → one of the others. BROKEN is never stored: the row cannot be read."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    CANCELED = "CANCELED"
    FAILED = "FAILED"
    SUSPENDED = "SUSPENDED"
    BROKEN = "BROKEN"

    @property
    def is_over(self) -> bool:
        return self.value not in UNENDED


UNENDED = (ExecutionStatus.STARTING.value, ExecutionStatus.RUNNING.value)


class SnapshotStatus(StrEnum):
    """IN_PROGRESS → COMPLETED or FAILED; COMPLETED → DELETING → DELETED. BROKEN: the row cannot be read."""

    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    DELETING = "DELETING"
    DELETED = "DELETED"
    BROKEN = "BROKEN"


class SnapshotTrigger(StrEnum):
    PERIODIC = "PERIODIC"
    MANUAL = "MANUAL"
    STOP = "STOP"
    INPUT_ENDED = "INPUT_ENDED"
    REWIND = "REWIND"
    EDIT = "EDIT"
    UNKNOWN = "UNKNOWN"


# Keys of an execution's recovery. What the sources read, also a property of snapshots:
SOURCE_IDENTITIES = "source_identities"
# Whether a supervisor launches runs of its stream.
IS_LAUNCHED = "is_launched"
# Batch assets that the stream reads, and that are built from another stream's output.
BATCH_INPUTS = "batch_inputs"
# The origin of the request that started it.
REQUESTED_BY = "requested_by"
# What `running_program` returns.
PROGRAM = "program"
# What its driver was launched with (`client/launching.py`).
LAUNCH = "launch"
# The origin of requests by which the supervisor reaches a desired state.
DESIRED_STATE_ORIGIN = "desired state"
# Arguments of a START request. The execution whose driver is launched again:
LAUNCH_OF = "launch_of"
# The failed execution that is restarted:
RESTART_OF = "restart_of"
# Whether its run checks the code, then suspends the query.
HANDS_OVER = "hands_over"
# Token of the lease under which it is carried out.
TAKEN_UNDER = "taken_under"
# Argument of a SUSPEND request: the START request that continues there.
FOR_START = "for_start"


class HoldKind(StrEnum):
    """Why a snapshot is held.

    USE: A process reads it; the hold expires unless renewed.
    TAG: A user keeps it until the tag is released.
    REFERENCE: An unfinished request, restore or upgrade refers to it.
    """

    USE = "USE"
    TAG = "TAG"
    REFERENCE = "REFERENCE"


class RequestKind(StrEnum):
    CHECKPOINT = "CHECKPOINT"
    SAVEPOINT = "SAVEPOINT"
    STOP_WITH_SAVEPOINT = "STOP_WITH_SAVEPOINT"
    CANCEL = "CANCEL"
    SUSPEND = "SUSPEND"
    START = "START"
    UNKNOWN = "UNKNOWN"


class RequestStatus(StrEnum):
    """PENDING → ACCEPTED → COMPLETED or FAILED; before an answer WITHDRAWN. BROKEN: the row cannot be read."""

    PENDING = "PENDING"
    ACCEPTED = "ACCEPTED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    WITHDRAWN = "WITHDRAWN"
    BROKEN = "BROKEN"


UNANSWERED = (RequestStatus.PENDING.value, RequestStatus.ACCEPTED.value)


class EventType(StrEnum):
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
    CODE_TRIED = "CODE_TRIED"
    HANDED_OVER = "HANDED_OVER"
    ALERT = "ALERT"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class StreamRecord:
    """A stream.

    Attributes:
        live_directory: Spark's checkpoint location; None before the first start and after a cancellation that deleted
            it.
        timeline: Increases with each rewind or restore; recovery ignores snapshots taken after the branch.
        plan: The plan of the state; None or empty if unknown.
        accepted_plan: Fingerprint of another plan that a user allowed.
        state_edits: Ids of the edits in this state, oldest first.
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

    @property
    def may_have_gone_back(self) -> bool:
        """Whether the stream has another timeline than the one that its first start began."""
        began_empty = self.origin is not None and self.origin.kind is OriginKind.EMPTY
        return self.timeline > (1 if began_empty else 0)

    def plan_in(self, directory: str | None) -> Mapping[str, Any] | None:
        """The plan of the state in the current directory (None), or in the one that it was made from."""
        origin = self.origin
        is_former = origin is not None and directory is not None and origin.directory == directory
        return origin.plan if origin is not None and is_former and origin.plan is not None else self.plan

    def plan_of(self, snapshot: SnapshotRecord) -> Mapping[str, Any] | None:
        """The plan of a snapshot, or the one noted when the state was made from it."""
        origins = (self.origin, self.origin.earlier if self.origin is not None else None)
        known = [each.plan for each in origins if each is not None and each.snapshot_id == snapshot.snapshot_id]
        return next((plan for plan in (snapshot.plan, *known) if plan), None)


_BEGUN = {
    "START_EMPTY": "empty state",
    "RESUME": "the live directory",
    "CLONE": "a copy of the live directory",
    "REWIND": "an earlier batch",
    "REPLAY": "replayed batches",
    "FINISH_RESTORE": "an interrupted restore",
}


class BatchInput(NamedTuple):
    upstream: str
    asset: str


@dataclass(frozen=True)
class ExecutionRecord:
    """One attempt to run a stream; it is `settled` once it was restarted or its retention was applied."""

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

    @property
    def newest_batch(self) -> int | None:
        batch_id = (self.progress or {}).get("batch_id")
        return batch_id if isinstance(batch_id, int) else None

    @property
    def sinks(self) -> tuple[str, ...]:
        sinks = (self.progress or {}).get("sinks")
        return tuple(map(str, sinks)) if isinstance(sinks, list) else ()

    @property
    def program(self) -> dict[str, str]:
        return _dict_in(self.recovery, PROGRAM)

    @property
    def launch(self) -> dict[str, Any]:
        return _dict_in(self.recovery, LAUNCH)

    @property
    def began_with(self) -> str:
        """What it started from, other than a snapshot."""
        kind = str((self.recovery or {}).get("kind", ""))
        return _BEGUN.get(kind, kind)

    @property
    def shown_cause(self) -> str:
        """The cause to show: the catalog counts a start for the desired state as manual."""
        is_reached = (self.recovery or {}).get(REQUESTED_BY) == DESIRED_STATE_ORIGIN
        return "DESIRED_STATE" if is_reached and self.cause is StartCause.MANUAL else self.cause.value

    @property
    def batch_inputs(self) -> list[BatchInput]:
        found = (self.recovery or {}).get(BATCH_INPUTS)
        pairs = found if isinstance(found, list) else []
        return [BatchInput(str(each[0]), str(each[1])) for each in pairs if isinstance(each, list) and len(each) > 1]

    @property
    def is_launched(self) -> bool:
        return bool((self.recovery or {}).get(IS_LAUNCHED))


@dataclass(frozen=True)
class Holder:
    execution_id: str
    run_id: str
    host: str
    pid: int
    process_start_ticks: int | None
    boot_id: str
    jvm_pid: int | None = None
    jvm_start_ticks: int | None = None


@dataclass(frozen=True, kw_only=True)
class LeaseRecord(Holder):
    """The lease of a stream and its holder.

    Attributes:
        token: Increases with each change of holder.
        expired: By the database's clock, when it was read.
        predecessor_unproven: A previous holder may still write, and is not fenced.
    """

    stream_id: str
    token: int
    acquired_at_ms: int
    renewed_at_ms: int
    expires_at_ms: int
    expired: bool
    predecessor_unproven: bool = False


# Property of an attempt in progress: where its savepoint goes, if not to the configured folder.
TARGET_DIRECTORY = "target_directory"
PROVEN_AT_MS = "proven_at_ms"
BROKEN_SINCE_MS = "broken_since_ms"
# Whether reading the state with Spark found the problem of a snapshot; missing in rows of earlier versions.
PROBLEM_IN_STATE = "problem_in_state"
RENEWED_AT_MS = "renewed_at_ms"


@dataclass(frozen=True)
class SnapshotRecord:
    """A checkpoint or savepoint.

    Attributes:
        full_bytes: Bytes that a restore reads; `incremental_bytes` were written.
        rows: Input rows since the previous snapshot, as far as its execution saw them.
        claimed: A start claimed it: the stream deletes it like a checkpoint.
        schedule: The schedule that took it, whose history alone deletes it.
        verified_problem: None if it can be restored or was never verified.
    """

    snapshot_id: str
    stream_id: str
    execution_id: str | None
    kind: SnapshotKind
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
        sizes = {"": self.full_bytes, " new": self.incremental_bytes}
        known = [f"{size / 1e6:,.1f} MB{what}" for what, size in sizes.items() if size is not None]
        facts = ", ".join([f"{self.name} of {self.stream_id} at batch {self.batch_id}", self.status.value, *known])
        return f"SnapshotRecord({facts})"

    @property
    def reference(self) -> str:
        """What a user names it by: `chk-<n>`, or a savepoint's label or id."""
        if self.kind is SnapshotKind.CHECKPOINT:
            return f"chk-{self.number}"
        return self.label or self.snapshot_id

    @property
    def name(self) -> str:
        return self.reference if self.kind is SnapshotKind.CHECKPOINT else f"savepoint {self.reference}"

    @property
    def place(self) -> tuple[int, int, int]:
        """A sort key by the state of snapshots: a promoted checkpoint is as old as its original."""
        return self.timeline, -1 if self.batch_id is None else self.batch_id, self.number or 0

    @property
    def is_renewed(self) -> bool:
        return RENEWED_AT_MS in self.properties

    @property
    def is_proven(self) -> bool:
        """Whether its state was loaded from storage and no later check found it broken.

        Either a query that resumed there committed a batch, or a verification read the state with Spark.
        """
        return self.verified_problem is None and PROVEN_AT_MS in self.properties

    @property
    def plan(self) -> dict[str, Any]:
        return _dict_in(self.properties, "plan")

    @property
    def state_edits(self) -> tuple[str, ...]:
        edits = self.properties.get("state_edits")
        return tuple(map(str, edits)) if isinstance(edits, list) else ()

    @property
    def edit(self) -> dict[str, Any]:
        return _dict_in(self.properties, "edit")

    @property
    def lags(self) -> dict[str, int]:
        return lags_in(self.properties)

    @property
    def watermark_ms(self) -> int | None:
        return watermark_ms_of(self.watermark)


def _dict_in(values: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    found = (values or {}).get(name)
    return found if isinstance(found, dict) else {}


def watermark_ms_of(watermark: str | None) -> int | None:
    """None: there is no watermark, it cannot be read, or it is 1970, which Spark reports before its first rows."""
    return _watermark_ms(watermark) or None if watermark else None


def unreadable_watermark(watermark: str | None) -> str | None:
    return watermark if watermark and _watermark_ms(watermark) is None else None


_YEAR = re.compile(r"[+-]?\d{4,9}(?=-\d\d-\d\dT)")
_CYCLE_YEARS = 400
_CYCLE_MS = 146_097 * 24 * 3_600_000


def _watermark_ms(watermark: str) -> int | None:
    """Read a time of Spark, also one whose year `datetime` does not have: dates repeat every 400 years."""
    cycles = 0
    found = _YEAR.match(watermark)
    if found is not None:
        cycles, year = divmod(int(found[0]) - 2000, _CYCLE_YEARS)
        watermark = f"{2000 + year}{watermark[found.end() :]}"
    try:
        return round(datetime.fromisoformat(watermark).timestamp() * 1000) + cycles * _CYCLE_MS
    except (ValueError, OverflowError):
        return None


def lags_in(properties: Mapping[str, Any]) -> dict[str, int]:
    lags = properties.get("records_behind")
    if not isinstance(lags, dict):
        return {}
    return {str(name): behind for name, behind in lags.items() if type(behind) is int}


def records_behind_in(properties: Mapping[str, Any]) -> int | None:
    lags = lags_in(properties)
    return min(sum(lags.values()), LARGEST_LONG) if lags else None


@dataclass(frozen=True)
class CompletedSnapshot:
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
    """A driver that outlives the process that launched it, on `host` or submitted to a cluster from there."""

    request_id: str
    stream_id: str
    run_id: str
    host: str
    boot_id: str
    pid: int
    process_start_ticks: int | None
    command: str
    log: str
    launched_at_ms: int = 0


@dataclass(frozen=True)
class EventRecord:
    sequence: int
    stream_id: str
    type: EventType
    snapshot_id: str | None
    execution_id: str | None
    payload: dict[str, Any]
    at_ms: int


@dataclass(frozen=True)
class RunFailure:
    at_ms: int
    reason: str
