"""The facts a recovery is planned from, and the plan: frozen values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from dagster_ckpt.catalog.records import SnapshotRecord, StreamRecord
from dagster_ckpt.catalog.recoveries import PointFailure
from dagster_ckpt.sinks.file_sink_damage import DamagedLog
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveState
from dagster_ckpt.spark.checkpoint_dir.restore import Donor
from dagster_ckpt.stream.source_offsets import SourceOffsets
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.durations import rounded_duration


class RecoveryKind(Enum):
    """What an execution starts from.

    REPLAY is a RESTORE after which lost batches are replayed: see `replay.py`.
    """

    START_EMPTY = "START_EMPTY"
    RESUME = "RESUME"
    CLONE = "CLONE"
    RESTORE = "RESTORE"
    REWIND = "REWIND"
    REPLAY = "REPLAY"
    FINISH_RESTORE = "FINISH_RESTORE"


@dataclass(frozen=True)
class PassedPoint:
    """A point that a recovery skips.

    Attributes:
        name: Its name, for messages.
        why: What is wrong with it.
        rewound_batches: Committed batches between it and the stream's current state; None if unknown.
        rewound_ms: The time between them; None if unknown.
    """

    name: str
    why: str
    rewound_batches: int | None = None
    rewound_ms: int | None = None


@dataclass(frozen=True)
class RecoveryPlan:
    """The decision and its reason.

    Attributes:
        kind: The kind of start.
        reason: One sentence for messages.
        snapshot: The snapshot to restore, for RESTORE.
        from_batch: The current batch of the live directory, if known.
        to_batch: The batch the query will resume after, if known; below `from_batch` it is a rewind.
        new_query_id: Whether the query continues under a new query id, for RESTORE and REWIND.
        claims: Whether the stream takes ownership of the snapshot, for RESTORE.
        donor: A live directory whose files may be linked, for RESTORE; None: everything is read from
            the snapshot.
        directory: The live directory to rewind, for REWIND, None for the stream's current one; for REPLAY
            the one in which the batches were replayed.
        point: Name of the point to continue from, to remember failures of it; None for an empty start.
        passed: Better points that are skipped, the best one first.
        rewound_ms: Time between the chosen point and the query's last sign of life: the maximum that is
            processed again. None if one of them is unknown.
        source_offsets: Where Kafka sources continue, for RESTORE and REWIND; None: where they stopped.
        query_id: The id under which the sinks have the replayed batches, for REPLAY.
        in_flight: The batch after `to_batch` if exactly its rows are processed first, for REPLAY; None if its plan was
            not recorded.
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
    source_offsets: SourceOffsets | None = None
    query_id: str | None = None
    in_flight: int | None = None

    @property
    def rewound_batches(self) -> int:
        """Number of committed batches that will be processed again."""
        if self.from_batch is None or self.to_batch is None:
            return 0
        return max(0, self.from_batch - self.to_batch)

    @property
    def undoes_nothing(self) -> bool:
        """Whether lost batches are replayed up to the newest that is known, so that no sink gets one again."""
        return self.kind is RecoveryKind.REPLAY and not self.rewound_batches

    def as_record(self) -> dict[str, object]:
        """The plan as stored in the catalog."""
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
            **({"source_offsets": str(self.source_offsets)} if self.source_offsets is not None else {}),
        }


@dataclass(frozen=True)
class UnknownState:
    """What exists in the folders of a stream that its catalog knows no start of, each described briefly.

    Attributes:
        directories: Live directories that contain batches.
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
        stream: The stream's record in the catalog.
        live: State of the stream's current live directory; None if it never had one.
        snapshots: Restorable snapshots of the current timeline, newest first.
        all_snapshots: Every completed snapshot of the stream, and the one at a named location: the
            candidates for an explicit name.
        last_batch: The newest batch that any execution reported as committed in that directory, or
            None.
        has_run: Whether a query was ever started in that directory.
        predecessor_ended: Whether the previous execution can write nothing more.
        prefer_checkpoint: Flink's prefer-checkpoint-for-recovery.
        start_from: The requested starting point.
        retained: Batches that the live directory can be rewound to, ascending; only determined if one
            is requested.
        ended_in_order: Whether every execution in the live directory has a recorded end that was not a
            failure, in this boot of this machine.
        failures: Recovery failures since the last good checkpoint, oldest first.
        origin_batch_is_retained: Whether the directory from which the live one was created still has
            its batch.
        origin_snapshot_is_gone: Whether the snapshot from which the live directory was created is known
            to be deleted.
        is_automatic: Whether no user requested this start: snapshots known to be broken are then not
            tried.
        depth: Number of points that a recovery considers besides the live directory; None: all.
        unknown: What exists in the folders of a stream that its catalog knows no start of.
        without_input: Points that would read again what a source no longer has, each with what is gone. Of a start from
            `latest`: it continues from a newer point.
        last_sign_ms: When a query in the live directory last showed a sign of life, by the catalog's
            clock.
        damaged_logs: Logs of the stream's file sinks that only a snapshot brings back.
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
    without_input: Mapping[str, str] = field(default_factory=dict)
    damaged_logs: Sequence[DamagedLog] = ()

    @property
    def before_the_edit(self) -> list[SnapshotRecord]:
        """Snapshots that lack an edit which the stream's state contains: a recovery does not use them."""
        edits = set(self.stream.state_edits)
        return [snapshot for snapshot in self.all_snapshots if not edits <= set(snapshot.state_edits)]

    def batches_since(self, batch_id: int | None) -> int | None:
        """Committed batches between a batch and the stream's current state; None if one of them is unknown."""
        if batch_id is None or self.live_batch is None:
            return None
        return max(0, self.live_batch - batch_id)

    def time_since(self, snapshot: SnapshotRecord | None) -> int | None:
        """Milliseconds between a snapshot and the query's last sign of life; None if one of them is unknown."""
        if snapshot is None or not snapshot.created_at_ms or self.last_sign_ms is None:
            return None
        return max(0, self.last_sign_ms - snapshot.created_at_ms)

    @property
    def live_batch(self) -> int | None:
        """The stream's current batch, as far as known."""
        if self.live is not None and self.live.batch_id is not None:
            return self.live.batch_id
        return self.last_batch


@dataclass(frozen=True)
class RewindDistance:
    """The distance between two snapshots of one timeline.

    Attributes:
        batches: Committed batches between them; None if a snapshot does not record its batch.
        rows: Input rows that the catalog recorded between them; None if a snapshot has no figure.
        span_ms: Milliseconds between their completions; None if unknown.
    """

    batches: int | None
    rows: int | None
    span_ms: int | None

    def __str__(self) -> str:
        batches = "an unknown number of batches" if self.batches is None else f"{self.batches} batches"
        rows = "rows unknown" if self.rows is None else f"{self.rows:,} rows"
        span = "time unknown" if self.span_ms is None else rounded_duration(self.span_ms)
        return f"{batches}, {rows}, {span}"


def skipped_distance(snapshots: Sequence[SnapshotRecord], chosen: SnapshotRecord) -> RewindDistance | None:
    """How far `chosen` is behind the newest snapshot, or None if it is the newest.

    Args:
        snapshots: Restorable snapshots of one timeline, newest first, including `chosen`.
        chosen: The snapshot that a recovery uses.
    """
    newer = snapshots[: next(at for at, snapshot in enumerate(snapshots) if snapshot.snapshot_id == chosen.snapshot_id)]
    if not newer:
        return None
    rows = [snapshot.rows for snapshot in newer if snapshot.rows is not None]
    return RewindDistance(
        batches=_difference(newer[0].batch_id, chosen.batch_id),
        # A snapshot counts the rows since the previous one.
        rows=sum(rows) if len(rows) == len(newer) else None,
        span_ms=_difference(newer[0].completed_at_ms, chosen.completed_at_ms),
    )


def _difference(newer: int | None, older: int | None) -> int | None:
    return None if newer is None or older is None else max(0, newer - older)
