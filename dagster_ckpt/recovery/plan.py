"""What a recovery is planned from, and the plan: frozen values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from dagster_ckpt.catalog.records import SnapshotRecord, StreamRecord
from dagster_ckpt.catalog.recovery_records import PointFailure
from dagster_ckpt.spark.checkpoint_dir.donors import Donor
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveState, LiveStatus
from dagster_ckpt.stream.start_from import StartFrom


class RecoveryKind(Enum):
    """What an execution starts from."""

    START_EMPTY = "START_EMPTY"
    RESUME = "RESUME"
    ADOPT = "ADOPT"
    RESTORE = "RESTORE"
    REWIND = "REWIND"
    FINISH_RESTORE = "FINISH_RESTORE"


@dataclass(frozen=True)
class PassedPoint:
    """A point that a recovery passes over.

    Attributes:
        name: What a person calls it.
        why: What is wrong with it.
        rewound_batches: How many committed batches are between where the stream stood and it; None where unknown.
        rewound_ms: How much time is; None where unknown.
    """

    name: str
    why: str
    rewound_batches: int | None = None
    rewound_ms: int | None = None


@dataclass(frozen=True)
class RecoveryPlan:
    """The decision and its reason.

    Attributes:
        kind: What is done.
        reason: One sentence for a person.
        snapshot: The snapshot to restore, for RESTORE.
        from_batch: The batch the live directory stands at, where known.
        to_batch: The batch the query will stand at, where known; below `from_batch` it is a rewind.
        new_query_id: Whether the query goes on as another one, for RESTORE and REWIND.
        claims: Whether the stream owns the snapshot from now on, for RESTORE.
        donor: A live directory whose files may be linked, for RESTORE; None: all is read from the snapshot.
        directory: The live directory to go back in, for REWIND; None: the stream's own.
        point: Name of the point that is gone on from, for what is remembered of it; None for an empty start.
        passed: Better points that are passed over, the best one first.
        rewound_ms: Time between the point that is gone back to and the last sign of life of the query, at most so much
            is processed again; None where one of them is not known.
    """

    kind: RecoveryKind
    reason: str
    snapshot: SnapshotRecord | None = None
    from_batch: int | None = None
    to_batch: int | None = None
    new_query_id: bool = False
    claims: bool = False
    donor: Donor | None = None
    directory: str | None = None
    point: str | None = None
    passed: tuple[PassedPoint, ...] = ()
    rewound_ms: int | None = None

    @property
    def rewound_batches(self) -> int:
        """How many committed batches will be processed again."""
        if self.from_batch is None or self.to_batch is None:
            return 0
        return max(0, self.from_batch - self.to_batch)

    def as_record(self) -> dict[str, object]:
        """The plan as the catalog keeps it."""
        return {
            "kind": self.kind.value,
            "reason": self.reason,
            "snapshot_id": self.snapshot.snapshot_id if self.snapshot else None,
            "from_batch": self.from_batch,
            "to_batch": self.to_batch,
            "new_query_id": self.new_query_id,
            "claims": self.claims,
            "point": self.point,
            "rewound_batches": self.rewound_batches,
            "rewound_ms": self.rewound_ms,
            "passed": [vars(point) for point in self.passed],
        }


@dataclass(frozen=True)
class UnknownState:
    """What lies in the places of a stream that its catalog knows no start of, each in a few words.

    Attributes:
        directories: Live directories that hold batches.
        snapshots: Checkpoints and savepoints.
        sinks: Logs of the file sinks that these snapshots name, and of the one that the query names.
    """

    directories: Sequence[str] = ()
    snapshots: Sequence[str] = ()
    sinks: Sequence[str] = ()


NOTHING_UNKNOWN = UnknownState()


@dataclass(frozen=True)
class RecoveryFacts:
    """What is known when a stream starts.

    Attributes:
        stream: The stream as the catalog has it.
        live: State of the stream's current live directory; None where it never had one.
        snapshots: Restorable snapshots of the current timeline, newest first.
        all_snapshots: Every completed snapshot of the stream, and the one at a location named: what an explicit name
            may mean.
        last_batch: The newest batch any execution reported as committed in that directory, or None.
        has_run: Whether a query was ever started in that directory.
        predecessor_ended: Whether the execution before can write nothing any more.
        prefer_checkpoint: Flink's prefer-checkpoint-for-recovery.
        start_from: What was asked for.
        retained: Batches that the live directory can be rewound to, ascending; looked for where one is asked for.
        ended_in_order: Whether each execution in the live directory has a recorded end that was no failure, in this
            boot of this machine.
        failures: What recoveries have failed at since the last good checkpoint, oldest first.
        origin_batch_is_retained: Whether the directory that the live one was made from still has its batch.
        origin_snapshot_is_gone: Whether the snapshot that the live directory was made from is known to be deleted.
        is_automatic: Whether nobody asked for this start: a snapshot that is known to be broken is not tried then.
        depth: At how many points beside the live directory a recovery looks; None: at all there are.
        unknown: What lies in the places of a stream that its catalog knows no start of.
        last_sign_ms: When a query in the live directory last gave a sign of life, by the clock of the catalog.
    """

    stream: StreamRecord
    live: LiveState | None
    snapshots: Sequence[SnapshotRecord]
    all_snapshots: Sequence[SnapshotRecord]
    last_batch: int | None
    has_run: bool
    predecessor_ended: bool
    prefer_checkpoint: bool
    start_from: StartFrom
    retained: Sequence[int] = ()
    ended_in_order: bool = False
    failures: Sequence[PointFailure] = ()
    origin_batch_is_retained: bool = False
    origin_snapshot_is_gone: bool = False
    is_automatic: bool = False
    depth: int | None = None
    unknown: UnknownState = NOTHING_UNKNOWN
    last_sign_ms: int | None = None

    def batches_since(self, batch_id: int | None) -> int | None:
        """Committed batches between a batch and where the stream stands; None where one of them is not known."""
        if batch_id is None or self.live_batch is None:
            return None
        return max(0, self.live_batch - batch_id)

    def time_since(self, snapshot: SnapshotRecord | None) -> int | None:
        """Time between a snapshot and the last sign of life of the query, ms; None where one of them is not known."""
        if snapshot is None or not snapshot.created_at_ms or self.last_sign_ms is None:
            return None
        return max(0, self.last_sign_ms - snapshot.created_at_ms)

    @property
    def live_batch(self) -> int | None:
        """The batch that the stream stands at, as far as that is known."""
        if self.live is not None and self.live.status is LiveStatus.GOOD:
            return self.live.batch_id
        return self.last_batch
