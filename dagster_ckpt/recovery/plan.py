"""The facts that a recovery is planned from, and the plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from dagster_ckpt.catalog.journal import PointFailure
from dagster_ckpt.catalog.records import SnapshotRecord, StreamRecord
from dagster_ckpt.recovery.recovery_points import snapshot_point
from dagster_ckpt.sinks.file_sink_repair import DamagedLog
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveState
from dagster_ckpt.spark.checkpoint_dir.restore import BEGINNING, Donor, Position, in_order
from dagster_ckpt.spark.query.sources import SourceIdentity
from dagster_ckpt.stream.edges import Read
from dagster_ckpt.stream.snapshots import describe_snapshot
from dagster_ckpt.stream.start_from import SourceMapping, SourceOffsets, StartFrom
from dagster_ckpt.values.durations import rounded_duration


class RecoveryKind(Enum):
    START_EMPTY = "START_EMPTY"
    RESUME = "RESUME"
    CLONE = "CLONE"
    RESTORE = "RESTORE"
    REWIND = "REWIND"
    REPLAY = "REPLAY"
    FINISH_RESTORE = "FINISH_RESTORE"


@dataclass(frozen=True)
class PassedPoint:
    name: str
    why: str
    rewound_batches: int | None = None
    rewound_ms: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """`from_batch` is the stream's current batch, if known."""

    kind: ClassVar[RecoveryKind]
    reason: str
    from_batch: int | None = None

    if TYPE_CHECKING:

        @property
        def to_batch(self) -> int | None:
            """The batch after which the query resumes."""

        @property
        def snapshot(self) -> SnapshotRecord | None: ...

        @property
        def directory(self) -> str | None:
            """A live directory to continue from, if not the current one."""

        @property
        def point(self) -> str | None:
            """The name under which failures of the point are remembered."""

        @property
        def rewound_ms(self) -> int | None:
            """Time from the point to the query's last sign of life: at most this is processed again."""

    @property
    def came_from(self) -> str:
        return describe_snapshot(self.snapshot) if self.snapshot is not None else "its live directory"

    @property
    def rewound_batches(self) -> int:
        if self.from_batch is None or self.to_batch is None:
            return 0
        return max(0, self.from_batch - self.to_batch)

    def as_record(self) -> dict[str, object]:
        return {
            "kind": self.kind.value,
            "reason": self.reason,
            "snapshot_id": self.snapshot.snapshot_id if self.snapshot else None,
            "from_batch": self.from_batch,
            "to_batch": self.to_batch,
            "new_query_id": False,
            "claims": False,
            "point": self.point,
            "rewound_batches": self.rewound_batches,
            "rewound_ms": self.rewound_ms,
            "passed": [],
            **self._details(),
        }

    def _details(self) -> dict[str, object]:
        return {}


class _OfTheLiveDirectory(_Plan):
    snapshot: ClassVar[None] = None
    directory: ClassVar[None] = None
    rewound_ms: ClassVar[None] = None


@dataclass(frozen=True, kw_only=True)
class StartEmpty(_OfTheLiveDirectory):
    kind = RecoveryKind.START_EMPTY
    to_batch: ClassVar[None] = None
    point: ClassVar[None] = None


@dataclass(frozen=True, kw_only=True)
class FinishRestore(_OfTheLiveDirectory):
    kind = RecoveryKind.FINISH_RESTORE
    to_batch: ClassVar[None] = None
    point: str


@dataclass(frozen=True, kw_only=True)
class _Continue(_OfTheLiveDirectory):
    point: str

    @property
    def to_batch(self) -> int | None:
        return self.from_batch


@dataclass(frozen=True, kw_only=True)
class Resume(_Continue):
    kind = RecoveryKind.RESUME


@dataclass(frozen=True, kw_only=True)
class Clone(_Continue):
    kind = RecoveryKind.CLONE


@dataclass(frozen=True)
class MappedSources:
    """A change of sources; `positions`: where each new one begins, once the sources were asked."""

    mapping: SourceMapping
    positions: Mapping[str, Position] = field(default_factory=dict)
    identities: tuple[SourceIdentity, ...] | None = None

    def offsets(self, before: Mapping[str, str | None]) -> dict[str, str | None]:
        continued, found = self.mapping.continued, dict[str, str | None]()
        for source in in_order(self.mapping.sources):
            is_new = source in self.mapping.new
            found[source] = self.position(source).offset if is_new else before.get(continued[source])
        return found

    def position(self, source: str) -> Position:
        return self.positions.get(source, BEGINNING)


@dataclass(frozen=True, kw_only=True)
class _GoBack(_Plan):
    """Go back to a point, passing over better ones (`passed`, best first).

    Without `source_offsets`, Kafka sources continue at the point's offsets; without `sources`, they do not change.
    """

    new_query_id: bool = False
    source_offsets: SourceOffsets | None = None
    sources: MappedSources | None = None
    passed: tuple[PassedPoint, ...] = ()

    def _details(self) -> dict[str, object]:
        return {
            "new_query_id": self.new_query_id,
            "passed": [vars(point) for point in self.passed],
            **({"source_offsets": str(self.source_offsets)} if self.source_offsets is not None else {}),
            **({"map_sources": str(self.sources.mapping)} if self.sources is not None else {}),
        }


@dataclass(frozen=True, kw_only=True)
class Restore(_GoBack):
    """Restore a snapshot, which the stream then owns if it `claims` it; files of the `donor` may be linked."""

    kind = RecoveryKind.RESTORE
    directory: ClassVar[None] = None
    snapshot: SnapshotRecord
    claims: bool = False
    donor: Donor | None = None
    rewound_ms: int | None = None

    @property
    def to_batch(self) -> int | None:
        return self.snapshot.batch_id

    @property
    def point(self) -> str:
        return snapshot_point(self.snapshot.snapshot_id)

    def _details(self) -> dict[str, object]:
        return {**super()._details(), "claims": self.claims}


@dataclass(frozen=True, kw_only=True)
class Rewind(_GoBack):
    """Go back in the files of a live directory, the current one if `directory` is None."""

    kind = RecoveryKind.REWIND
    to_batch: int
    point: str
    directory: str | None = None
    snapshot: ClassVar[None] = None
    rewound_ms: ClassVar[None] = None


@dataclass(frozen=True, kw_only=True)
class RestoreAndReplay(_Plan):
    """Restore a snapshot and replay the lost batches (`replay.py`).

    Attributes:
        query_id: The id under which the sinks have these batches.
        directory: Where the batches were replayed; None if not yet.
    """

    kind = RecoveryKind.REPLAY
    restore: Restore
    to_batch: int
    query_id: str
    in_flight: int | None = None
    directory: str | None = None

    @property
    def snapshot(self) -> SnapshotRecord:
        return self.restore.snapshot

    @property
    def point(self) -> str:
        return self.restore.point

    @property
    def rewound_ms(self) -> int | None:
        return self.restore.rewound_ms

    def _details(self) -> dict[str, object]:
        return self.restore._details()


RecoveryPlan = StartEmpty | FinishRestore | Resume | Clone | Restore | Rewind | RestoreAndReplay


@dataclass(frozen=True)
class UnknownState:
    """State in a stream's folders that its catalog does not know; `sinks` are logs of file sinks."""

    directories: Sequence[str] = ()
    snapshots: Sequence[str] = ()
    sinks: Sequence[str] = ()


NOTHING_UNKNOWN = UnknownState()


@dataclass(frozen=True)
class UndoneReads:
    """Rows that the stream has read, and that a stream upstream has undone since its last start.

    Attributes:
        points: What each point has read of them; empty if the stream need not go back.
        free: Points that have read none.
        reads: What a start records of the upstream streams.
        went_back: Whether an upstream stream went back without acceptance.
        why_kept: Why the stream keeps such rows; `points` is then empty.
    """

    points: Mapping[str, str] = field(default_factory=dict)
    free: frozenset[str] = frozenset()
    reads: tuple[Read, ...] = ()
    went_back: bool = False
    why_kept: str = ""

    def kept(self, why: str) -> UndoneReads:
        return replace(self, points={}, went_back=False, why_kept=why)

    def why_not(self, point: str) -> str | None:
        if not self.points or point in self.free:
            return None
        return self.points.get(point, "what it has read of other streams is not recorded")


NONE_UNDONE = UndoneReads()


@dataclass(frozen=True)
class RecoveryFacts:
    """What is known when a stream starts.

    Attributes:
        snapshots: Restorable snapshots of the current timeline, newest first.
        all_snapshots: Candidates for an explicit name: completed snapshots, and the one at a named location.
        last_batch: The newest batch that an execution reported as committed in the live directory.
        retained: Batches that the live directory can be rewound to, ascending, if the start names one.
        ended_in_order: Whether every execution in the live directory ended deliberately, in this boot.
        is_automatic: No user requested this start, so snapshots known to be broken are not tried.
        depth: How many points besides the live directory count; None: all.
        last_sign_ms: The last sign of life of a query in the live directory, by the catalog's clock.
        without_input: What is gone, by each point that would read it.
        damaged_logs: Logs of file sinks that only a snapshot brings back.
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
    undone: UndoneReads = NONE_UNDONE

    @property
    def before_the_edit(self) -> list[SnapshotRecord]:
        """Snapshots that lack an edit of the stream's state, so that no recovery uses them."""
        edits = set(self.stream.state_edits)
        return [snapshot for snapshot in self.all_snapshots if not edits <= set(snapshot.state_edits)]

    def batches_since(self, batch_id: int | None) -> int | None:
        return _difference(self.live_batch, batch_id)

    def time_since(self, snapshot: SnapshotRecord | None) -> int | None:
        return _difference(self.last_sign_ms, (snapshot.created_at_ms or None) if snapshot is not None else None)

    @property
    def live_batch(self) -> int | None:
        if self.live is not None and self.live.batch_id is not None:
            return self.live.batch_id
        return self.last_batch


@dataclass(frozen=True)
class RewindDistance:
    batches: int | None
    rows: int | None
    span_ms: int | None

    def __str__(self) -> str:
        batches = "an unknown number of batches" if self.batches is None else f"{self.batches} batches"
        rows = "rows unknown" if self.rows is None else f"{self.rows:,} rows"
        span = "time unknown" if self.span_ms is None else rounded_duration(self.span_ms)
        return f"{batches}, {rows}, {span}"


def skipped_distance(snapshots: Sequence[SnapshotRecord], chosen: SnapshotRecord) -> RewindDistance | None:
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
