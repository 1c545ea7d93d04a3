"""The history of streams, and the deletion of old rows that nothing refers to and no decision needs.

Each query starts from the streams and uses an index, so its cost does not grow with the history.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, Table, and_, func, or_, select, text

from dagster_ckpt.catalog.database import Records, as_dict, cells, optional_dict, read_dict, read_enum
from dagster_ckpt.catalog.records import (
    UNANSWERED,
    UNENDED,
    EventRecord,
    EventType,
    SnapshotRecord,
    SnapshotStatus,
    SnapshotTrigger,
    StreamRecord,
    watermark_ms_of,
)
from dagster_ckpt.catalog.tables import (
    event_counter,
    events,
    executions,
    holds,
    launches,
    recovery_failures,
    requests,
    snapshots,
    streams,
    timelines,
)
from dagster_ckpt.values.modes import SnapshotKind
from dagster_ckpt.values.safe_parsing import LARGEST_LONG


@dataclass(frozen=True)
class SnapshotTally:
    count: int
    rows: int
    incremental_bytes: int


@dataclass(frozen=True)
class SnapshotHistory:
    """Health indicators of a stream from its snapshots.

    Attributes:
        verified: The last verified one; may have been deleted since.
        broken: The newest existing one that its last verification found broken.
        failures: Failed attempts since the newest snapshot.
        bytes_before: Full bytes of the first snapshot in the requested window.
        slowest_ms: Of the last completed checkpoints.
    """

    newest: SnapshotRecord | None = None
    verified: SnapshotRecord | None = None
    broken: SnapshotRecord | None = None
    failures: int = 0
    last_failure: str | None = None
    bytes_before: int | None = None
    slowest_ms: int | None = None


_restorable = snapshots.alias("restorable")
_verified = snapshots.alias("verified")
_failed = snapshots.alias("failed")
_sized = snapshots.alias("sized")
_timed = snapshots.alias("timed")
_TIMED = 10


WAS_COMPLETED = (SnapshotStatus.COMPLETED.value, SnapshotStatus.DELETING.value, SnapshotStatus.DELETED.value)


def _newest_restorable(wanted: Any) -> Any:
    return (
        select(wanted)
        .where(_restorable.c.stream_id == streams.c.stream_id, _restorable.c.status == SnapshotStatus.COMPLETED.value)
        .where(
            # Edited state is used only if a start named it.
            ((_restorable.c.timeline == streams.c.timeline) & (_restorable.c.trigger != SnapshotTrigger.EDIT.value))
            | (_restorable.c.snapshot_id == streams.c.restored_snapshot_id)
        )
        # In the order of `SnapshotRecords.restorable`.
        .order_by(func.coalesce(_restorable.c.batch_id, -1).desc(), _restorable.c.number.desc())
        .limit(1)
        .correlate(streams)
        .scalar_subquery()
    )


def past_of(timeline: int, begins: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """The ancestors of a timeline, each with its last batch that belongs to the history.

    Args:
        begins: The parent of each timeline, and the batch after which it branched off.
    """
    past: dict[int, int] = {}
    to_batch: int | None = None
    while timeline in begins:
        timeline, batch = begins[timeline]
        to_batch = batch if to_batch is None else min(batch, to_batch)
        if timeline in past:
            break
        past[timeline] = to_batch
    return past


def _histories(stream_ids: Sequence[str], since_ms: int) -> Select[Any]:
    """One row per stream, with columns as in `SnapshotHistory`; snapshots are ids."""
    newest_number = func.coalesce(_newest_restorable(_restorable.c.number), 0)
    failed_since = and_(
        _failed.c.stream_id == streams.c.stream_id,
        _failed.c.status == SnapshotStatus.FAILED.value,
        _failed.c.number > newest_number,
        # A renewal completes the newest one again, under its old number.
        _failed.c.created_at_ms >= func.coalesce(_newest_restorable(_restorable.c.completed_at_ms), 0),
    )
    verified = (
        select(_verified.c.snapshot_id)
        .where(_verified.c.stream_id == streams.c.stream_id, _verified.c.verified_at_ms.is_not(None))
        .limit(1)
    )
    broken = verified.where(
        _verified.c.status == SnapshotStatus.COMPLETED.value, _verified.c.verified_problem.is_not(None)
    ).order_by(_verified.c.number.desc())
    verified = verified.order_by(_verified.c.verified_at_ms.desc())
    failures = select(func.count()).select_from(_failed).where(failed_since)
    last_failure = select(_failed.c.failure_reason).where(failed_since).order_by(_failed.c.number.desc()).limit(1)
    first_size = (
        select(_sized.c.full_bytes)
        .where(
            _sized.c.stream_id == streams.c.stream_id,
            _sized.c.completed_at_ms >= since_ms,
            _sized.c.full_bytes.is_not(None),
        )
        .order_by(_sized.c.completed_at_ms)
        .limit(1)
    )
    slowest = select(func.max(_timed.c.duration_ms)).where(
        _timed.c.stream_id == streams.c.stream_id,
        _timed.c.status.in_(WAS_COMPLETED),
        _timed.c.number > newest_number - _TIMED,
        _timed.c.kind == SnapshotKind.CHECKPOINT.value,
    )
    return select(
        streams.c.stream_id,
        _newest_restorable(_restorable.c.snapshot_id).label("newest"),
        verified.correlate(streams).scalar_subquery().label("verified"),
        broken.correlate(streams).scalar_subquery().label("broken"),
        failures.correlate(streams).scalar_subquery().label("failures"),
        last_failure.correlate(streams).scalar_subquery().label("last_failure"),
        first_size.correlate(streams).scalar_subquery().label("bytes_before"),
        slowest.correlate(streams).scalar_subquery().label("slowest_ms"),
    ).where(streams.c.stream_id.in_(stream_ids))


_TALLY = f"""
SELECT span.place, count(*) AS taken, sum(snapshots.rows) AS rows, sum(snapshots.incremental_bytes) AS incremental_bytes
FROM span
JOIN events ON events.stream_id = span.stream_id AND events.sequence > span.since AND events.sequence <= span.last
    AND events.type = '{EventType.CHECKPOINT_COMPLETED.value}'
LEFT JOIN snapshots ON snapshots.snapshot_id = events.snapshot_id
GROUP BY span.place
"""


@dataclass(frozen=True)
class HistoryCursor:
    created_at_ms: int
    snapshot_id: str

    def __str__(self) -> str:
        return f"{self.created_at_ms}-{self.snapshot_id}"

    @staticmethod
    def parse(text: str) -> HistoryCursor:
        at_ms, _, snapshot_id = text.partition("-")
        return HistoryCursor(min(int(at_ms), LARGEST_LONG), snapshot_id)


@dataclass(frozen=True)
class HistoryPage:
    snapshots: tuple[SnapshotRecord, ...]
    older: HistoryCursor | None


@dataclass(frozen=True)
class SnapshotFigures:
    """Figures of a completed snapshot; `watermark_delay_ms` is from its watermark to its completion."""

    snapshot_id: str
    kind: SnapshotKind
    number: int | None
    batch_id: int | None
    completed_at_ms: int
    duration_ms: int | None
    full_bytes: int | None
    incremental_bytes: int | None
    state_rows: int | None
    rows: int | None
    records_behind: int | None
    watermark_delay_ms: int | None


@dataclass(frozen=True)
class ExecutionHistory:
    completed: int
    failed: int
    new_bytes: int
    newest: tuple[SnapshotRecord, ...]


@dataclass(frozen=True)
class Branch:
    """How a timeline began; `accepted` says why streams downstream may keep undone rows that they have read."""

    timeline: int
    parent: int
    to_batch: int
    accepted: str | None = None


_STORED = [name for name in SnapshotFigures.__dataclass_fields__ if name in snapshots.c]


class HistoryRecords(Records):
    def page(
        self,
        stream_id: str,
        *,
        limit: int,
        kind: SnapshotKind | None = None,
        status: SnapshotStatus | None = None,
        older_than: HistoryCursor | None = None,
    ) -> HistoryPage:
        query = of_stream(stream_id, kind, status)
        if older_than is not None:
            same_time = (snapshots.c.created_at_ms == older_than.created_at_ms) & (
                snapshots.c.snapshot_id < older_than.snapshot_id
            )
            # The index can use only the first condition.
            query = query.where(
                snapshots.c.created_at_ms <= older_than.created_at_ms,
                or_(snapshots.c.created_at_ms < older_than.created_at_ms, same_time),
            )
        query = query.order_by(snapshots.c.created_at_ms.desc(), snapshots.c.snapshot_id.desc()).limit(limit + 1)
        found = [read_snapshot(row) for row in self._database.rows(query)]
        shown = tuple(found[:limit])
        has_more = len(found) > limit and shown
        return HistoryPage(shown, HistoryCursor(shown[-1].created_at_ms, shown[-1].snapshot_id) if has_more else None)

    def figures(self, stream_id: str, *, limit: int) -> list[SnapshotFigures]:
        """Figures of the last completed snapshots, oldest first."""
        query = (
            select(*(snapshots.c[name] for name in _STORED), snapshots.c.watermark)
            .where(
                snapshots.c.stream_id == stream_id,
                snapshots.c.completed_at_ms.is_not(None),
                snapshots.c.status.in_(WAS_COMPLETED),
            )
            .order_by(snapshots.c.completed_at_ms.desc())
            .limit(limit)
        )
        rows = reversed(self._database.rows(query))
        return [figures for row in rows if (figures := _figures(row)) is not None]

    def of_execution(self, stream_id: str, execution_id: str, *, limit: int) -> ExecutionHistory:
        its_own = (snapshots.c.stream_id == stream_id) & (snapshots.c.execution_id == execution_id)
        totals = (
            select(snapshots.c.status, func.count(), func.coalesce(func.sum(snapshots.c.incremental_bytes), 0))
            .where(its_own)
            .group_by(snapshots.c.status)
        )
        newest = select(snapshots).where(its_own).order_by(snapshots.c.created_at_ms.desc()).limit(limit)
        with self._database.reading() as connection:
            found = {str(status): (int(count), int(written)) for status, count, written in connection.execute(totals)}
            shown = tuple(read_snapshot(row) for row in connection.execute(newest))
        completed = [found[status] for status in WAS_COMPLETED if status in found]
        return ExecutionHistory(
            completed=sum(count for count, _ in completed),
            failed=found.get(SnapshotStatus.FAILED.value, (0, 0))[0],
            new_bytes=sum(written for _, written in completed),
            newest=shown,
        )

    def counts(self, stream_id: str) -> Mapping[str, int]:
        query = (
            select(snapshots.c.status, func.count())
            .where(snapshots.c.stream_id == stream_id)
            .group_by(snapshots.c.status)
        )
        return {str(status): int(count) for status, count in self._database.rows(query)}

    def branches(self, stream_id: str) -> list[Branch]:
        query = (
            select(timelines.c.timeline, timelines.c.parent, timelines.c.to_batch, timelines.c.accepted)
            .where(timelines.c.stream_id == stream_id)
            .order_by(timelines.c.timeline.desc())
        )
        return [Branch(*row) for row in self._database.rows(query)]

    def begins(self, stream_id: str) -> dict[int, tuple[int, int]]:
        """The `begins` of `past_of`."""
        return {each.timeline: (each.parent, each.to_batch) for each in self.branches(stream_id)}

    def began_anew(self, stream: StreamRecord) -> bool:
        """Whether the stream ever started from empty state again, which undoes all it had written."""
        past = past_of(stream.timeline, self.begins(stream.stream_id))
        if -1 in past.values():
            return True
        # A timeline without a parent began empty, or its parent is missing in a rebuilt catalog: the event decides.
        emptied = select(events.c.sequence).where(
            events.c.stream_id == stream.stream_id,
            events.c.type == EventType.RESTORED.value,
            events.c.payload.contains('"origin":"EMPTY"', autoescape=True),
            events.c.payload.contains('"new_timeline":true', autoescape=True),
        )
        return min({*past, stream.timeline}) > 1 and bool(self._database.rows(emptied.limit(1)))

    def newest_of(self, stream_ids: Sequence[str]) -> dict[str, SnapshotRecord]:
        newest = snapshots.c.snapshot_id == _newest_restorable(_restorable.c.snapshot_id)
        query = (
            select(snapshots).select_from(streams.join(snapshots, newest)).where(streams.c.stream_id.in_(stream_ids))
        )
        return {row.stream_id: read_snapshot(row) for row in self._database.rows(query)}

    def of_streams(self, windows: Mapping[str, int]) -> dict[str, SnapshotHistory]:
        """The history of each stream; empty for one that never started.

        Args:
            windows: When the window of each stream begins (ms since the epoch).
        """
        listed: list[Row[Any]] = []
        for since_ms in set(windows.values()):
            alike = [stream_id for stream_id, begin_ms in windows.items() if begin_ms == since_ms]
            listed += self._database.rows(_histories(alike, since_ms))
        ids = [snapshot_id for row in listed for snapshot_id in (row.newest, row.verified, row.broken) if snapshot_id]
        rows = self._database.rows(select(snapshots).where(snapshots.c.snapshot_id.in_(ids)))
        named = {row.snapshot_id: read_snapshot(row) for row in rows}
        return {stream_id: SnapshotHistory() for stream_id in windows} | {
            row.stream_id: SnapshotHistory(
                newest=named.get(row.newest),
                verified=named.get(row.verified),
                broken=named.get(row.broken),
                failures=row.failures,
                last_failure=row.last_failure,
                bytes_before=row.bytes_before,
                slowest_ms=row.slowest_ms,
            )
            for row in listed
        }

    def tallies(self, spans: Sequence[tuple[str, int, int]]) -> list[SnapshotTally]:
        """Count the checkpoints completed in spans of events: stream, sequence before the first, and the last."""
        if not spans:
            return []
        # SQLAlchemy compiles a `values()` of hundreds of rows slowly.
        listed = ", ".join(f"({at}, :stream_{at}, {after:d}, {last:d})" for at, (_, after, last) in enumerate(spans))
        query = text(f"WITH span (place, stream_id, since, last) AS (VALUES {listed}) {_TALLY}")
        bound = query.bindparams(**{f"stream_{at}": stream_id for at, (stream_id, _, _) in enumerate(spans)})
        found = {
            row.place: SnapshotTally(int(row.taken), int(row.rows or 0), int(row.incremental_bytes or 0))
            for row in self._database.rows(bound)
        }
        return [found.get(place, SnapshotTally(0, 0, 0)) for place in range(len(spans))]


class EventRecords(Records):
    """The event outbox, in commit order, without gaps: a reader's cursor never skips one."""

    def after(self, sequence: int, *, limit: int = 1000) -> list[EventRecord]:
        query = select(events).where(events.c.sequence > sequence).order_by(events.c.sequence).limit(limit)
        return [_event(row) for row in self._database.rows(query)]

    def last_of(
        self, stream_ids: Sequence[str], types: Collection[EventType], *, up_to: int, each: int
    ) -> dict[str, list[EventRecord]]:
        """The last events of each stream, at most `each`, oldest first."""
        names = [kind.value for kind in types]
        past = events.alias("past")
        # Driven by the streams: the index finds the start.
        begin = (
            select(past.c.sequence)
            .where(past.c.stream_id == streams.c.stream_id, past.c.sequence <= up_to, past.c.type.in_(names))
            .order_by(past.c.sequence.desc())
            .offset(each - 1)
            .limit(1)
            .correlate(streams)
            .scalar_subquery()
        )
        recent = and_(
            events.c.stream_id == streams.c.stream_id,
            events.c.sequence >= func.coalesce(begin, 0),
            events.c.sequence <= up_to,
        )
        query = (
            select(events)
            .select_from(streams.join(events, recent))
            .where(streams.c.stream_id.in_(stream_ids), events.c.type.in_(names))
            .order_by(events.c.sequence)
        )
        found: dict[str, list[EventRecord]] = {stream_id: [] for stream_id in stream_ids}
        for row in self._database.rows(query):
            found[row.stream_id].append(_event(row))
        return found

    def latest_sequence(self) -> int:
        with self._database.reading() as connection:
            return int(connection.execute(select(event_counter.c.last_sequence)).scalar_one())


def _event(row: Row[Any]) -> EventRecord:
    values = cells(row, events, [])
    values["type"] = read_enum(values["type"], EventType, EventType.UNKNOWN, "type", [])
    values["payload"] = as_dict(values["payload"])
    return EventRecord(**values)


def _figures(row: Row[Any]) -> SnapshotFigures | None:
    """Return the figures of a snapshot; None if its row is damaged."""
    troubles: list[str] = []
    stored = cells(row, snapshots, troubles)
    stored["kind"] = read_enum(stored["kind"], SnapshotKind, SnapshotKind.SAVEPOINT, "kind", troubles)
    watermark_ms = watermark_ms_of(stored.pop("watermark"))
    delay_ms = max(row.completed_at_ms - watermark_ms, 0) if watermark_ms is not None and not troubles else None
    return SnapshotFigures(**stored, watermark_delay_ms=delay_ms) if not troubles else None


_FIELDS = frozenset(field.name for field in fields(SnapshotRecord))


def of_stream(stream_id: str, kind: SnapshotKind | None, status: SnapshotStatus | None) -> Select[Any]:
    query = select(snapshots).where(snapshots.c.stream_id == stream_id)
    if kind is not None:
        query = query.where(snapshots.c.kind == kind.value)
    return query.where(snapshots.c.status == status.value) if status is not None else query


def read_snapshot(row: Row[Any]) -> SnapshotRecord:
    troubles: list[str] = []
    values = {name: value for name, value in cells(row, snapshots, troubles).items() if name in _FIELDS}
    values["properties"] = read_dict(values["properties"], "properties", troubles) or {}
    values["kind"] = read_enum(values["kind"], SnapshotKind, SnapshotKind.SAVEPOINT, "kind", troubles)
    values["trigger"] = read_enum(values["trigger"], SnapshotTrigger, SnapshotTrigger.UNKNOWN, "trigger", troubles)
    values["status"] = read_enum(values["status"], SnapshotStatus, SnapshotStatus.BROKEN, "status", troubles)
    if troubles:
        values["status"] = SnapshotStatus.BROKEN
        values["broken"] = "; ".join(troubles)
    return SnapshotRecord(**values)


# Kept for restart strategies, and for people who look back.
KEPT_EXECUTIONS = 20
# Rows per transaction: SQLite has one writer.
_CHUNK = 2_000


@dataclass(frozen=True)
class PrunedHistory:
    stream_id: str
    snapshots: int
    executions: int
    events: int
    requests: int
    recovery_failures: int

    @property
    def total(self) -> int:
        return self.snapshots + self.executions + self.events + self.requests + self.recovery_failures


class PruningRecords(Records):
    def prune(self, stream_id: str, *, before_ms: int, dry_run: bool = False) -> PrunedHistory:
        """Delete old rows of a stream, which may be running.

        These stay: snapshots that exist or are held, the one verified last, the one that the timeline began with, the
        preferred savepoint, the last executions, those of the current live directory, the last that reported sinks, the
        newest row that names each query, and open requests.
        """
        named_in_snapshots, named_in_executions = self._naming_queries(stream_id)
        rows = {
            "snapshots": (
                snapshots.c.snapshot_id,
                and_(_old_snapshots(stream_id, before_ms), snapshots.c.snapshot_id.not_in(named_in_snapshots)),
            ),
            "executions": (
                executions.c.execution_id,
                and_(_old_executions(stream_id, before_ms), executions.c.execution_id.not_in(named_in_executions)),
            ),
            "events": (events.c.sequence, and_(events.c.stream_id == stream_id, events.c.at_ms < before_ms)),
            "requests": (requests.c.request_id, _old_requests(stream_id, before_ms)),
            "recovery_failures": (
                recovery_failures.c.ordinal,
                and_(
                    recovery_failures.c.stream_id == stream_id,
                    recovery_failures.c.is_over.is_(True),
                    recovery_failures.c.at_ms < before_ms,
                ),
            ),
        }
        counted = {name: self._delete(key, old, dry_run=dry_run) for name, (key, old) in rows.items()}
        return PrunedHistory(stream_id, **counted)

    def _naming_queries(self, stream_id: str) -> tuple[list[str], list[str]]:
        """The newest rows that name each query: ids of snapshots, and of executions.

        A roll-back of a table has to know all query ids that were the stream's.
        """
        of_executions, of_snapshots = dict[str, str](), dict[str, str]()
        ran = select(executions.c.execution_id, executions.c.progress).where(executions.c.stream_id == stream_id)
        for row in self._database.rows(ran.order_by(executions.c.ordinal)):
            query_id = (optional_dict(row.progress) or {}).get("query_id")
            if isinstance(query_id, str):
                of_executions[query_id] = row.execution_id
        taken = select(snapshots.c.snapshot_id, snapshots.c.query_id).where(
            snapshots.c.stream_id == stream_id, snapshots.c.query_id.is_not(None)
        )
        for row in self._database.rows(taken.order_by(snapshots.c.number)):
            if row.query_id not in of_executions:
                of_snapshots[row.query_id] = row.snapshot_id
        return list(of_snapshots.values()), list(of_executions.values())

    def _delete(self, key: Any, old: ColumnElement[bool], *, dry_run: bool) -> int:
        table: Table = key.table
        if dry_run:
            with self._database.reading() as connection:
                return int(connection.execute(select(func.count()).select_from(table).where(old)).scalar_one())
        deleted = 0
        while True:
            with self._database.writing() as connection:
                count = _delete_chunk(connection, table, select(key).where(old).limit(_CHUNK), old)
            deleted += count
            if count < _CHUNK:
                return deleted


def _delete_chunk(connection: Connection, table: Table, some: Select[Any], old: ColumnElement[bool]) -> int:
    keys = connection.execute(some).scalars().all()
    column = some.selected_columns[0]
    # `old` again, because the key of a failed recovery is unique only within its stream.
    return connection.execute(table.delete().where(column.in_(keys), old)).rowcount if keys else 0


def _old_snapshots(stream_id: str, before_ms: int) -> ColumnElement[bool]:
    newest_verified = (
        select(snapshots.c.snapshot_id)
        .where(snapshots.c.stream_id == stream_id, snapshots.c.verified_at_ms.is_not(None))
        .order_by(snapshots.c.verified_at_ms.desc())
        .limit(1)
    )
    named = [
        select(column).where(streams.c.stream_id == stream_id, column.is_not(None))
        for column in (streams.c.restored_snapshot_id, streams.c.preferred_savepoint_id)
    ]
    held = select(holds.c.snapshot_id).where(holds.c.stream_id == stream_id)
    return and_(
        snapshots.c.stream_id == stream_id,
        snapshots.c.status.in_((SnapshotStatus.DELETED.value, SnapshotStatus.FAILED.value)),
        snapshots.c.created_at_ms < before_ms,
        *(snapshots.c.snapshot_id.not_in(each.scalar_subquery()) for each in (*named, newest_verified, held)),
    )


def _old_executions(stream_id: str, before_ms: int) -> ColumnElement[bool]:
    of_stream = executions.c.stream_id == stream_id
    others = executions.alias("others")
    last = select(func.max(others.c.ordinal)).where(others.c.stream_id == stream_id)
    with_sinks = last.where(others.c.progress.contains('"sinks":["', autoescape=True))
    live = select(streams.c.live_directory).where(streams.c.stream_id == stream_id).scalar_subquery()
    return and_(
        of_stream,
        executions.c.settled.is_(True),
        executions.c.status.not_in(UNENDED),
        executions.c.ended_at_ms < before_ms,
        executions.c.ordinal <= last.scalar_subquery() - KEPT_EXECUTIONS,
        executions.c.ordinal != func.coalesce(with_sinks.scalar_subquery(), 0),
        or_(executions.c.live_directory.is_(None), live.is_(None), executions.c.live_directory != live),
    )


def _old_requests(stream_id: str, before_ms: int) -> ColumnElement[bool]:
    referring = (holds.c.request_id, launches.c.request_id)
    return and_(
        requests.c.stream_id == stream_id,
        requests.c.status.not_in(UNANSWERED),
        requests.c.resolved_at_ms < before_ms,
        *(
            requests.c.request_id.not_in(
                select(column).where(column.table.c.stream_id == stream_id, column.is_not(None)).scalar_subquery()
            )
            for column in referring
        ),
    )
