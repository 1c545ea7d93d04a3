"""The history of a stream, read page by page: snapshots, executions and timelines of every restart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, func, or_, select

from dagster_ckpt.catalog.database import Database
from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus, watermark_ms_of
from dagster_ckpt.catalog.snapshot_queries import WAS_COMPLETED
from dagster_ckpt.catalog.snapshots import read_snapshot
from dagster_ckpt.catalog.tables import snapshots, timelines
from dagster_ckpt.values.untrusted import LARGEST_LONG


@dataclass(frozen=True)
class HistoryCursor:
    """Where the next page of a history begins.

    Attributes:
        created_at_ms: When the last snapshot of the page was begun.
        snapshot_id: Its id, for snapshots that were begun in the same millisecond.
    """

    created_at_ms: int
    snapshot_id: str

    def __str__(self) -> str:
        return f"{self.created_at_ms}-{self.snapshot_id}"

    @staticmethod
    def parse(text: str) -> HistoryCursor:
        """Read the text form.

        Raises:
            ValueError: It is not one.
        """
        at_ms, _, snapshot_id = text.partition("-")
        # A larger number is no time, and databases refuse it.
        return HistoryCursor(min(int(at_ms), LARGEST_LONG), snapshot_id)


@dataclass(frozen=True)
class HistoryPage:
    """One page of a history.

    Attributes:
        snapshots: The snapshots, newest first.
        older: Where the next page begins; None on the last one.
    """

    snapshots: tuple[SnapshotRecord, ...]
    older: HistoryCursor | None


@dataclass(frozen=True)
class SnapshotFigures:
    """The figures of a completed snapshot, which may have been deleted since; see `SnapshotRecord` for the others.

    Attributes:
        records_behind: Records that waited in the Kafka sources; None if they reported none.
        watermark_delay_ms: Time between the watermark and the completion; None without a watermark.
    """

    snapshot_id: str
    kind: str
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
    """The snapshots of one execution.

    Attributes:
        completed: Number of snapshots that were completed, including those deleted since.
        failed: Number of failed attempts.
        new_bytes: Number of bytes written for the completed ones.
        newest: The newest attempts, newest first.
    """

    completed: int
    failed: int
    new_bytes: int
    newest: tuple[SnapshotRecord, ...]


@dataclass(frozen=True)
class Branch:
    """The origin of a timeline.

    Attributes:
        timeline: The timeline.
        parent: The timeline that it branched off.
        to_batch: The last batch that both share.
    """

    timeline: int
    parent: int
    to_batch: int


_STORED = [name for name in SnapshotFigures.__dataclass_fields__ if name in snapshots.c]


class HistoryRecords:
    """Read-only queries whose cost does not grow with the length of the history."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def page(
        self,
        stream_id: str,
        *,
        limit: int,
        kind: str | None = None,
        status: SnapshotStatus | None = None,
        older_than: HistoryCursor | None = None,
    ) -> HistoryPage:
        """Snapshots of a stream, newest attempt first, including failed and deleted ones.

        Args:
            stream_id: The stream.
            limit: Maximum number of snapshots.
            kind: CHECKPOINT or SAVEPOINT; None for both.
            status: Only those with this status.
            older_than: Where the page begins; None for the first page.
        """
        query = select(snapshots).where(snapshots.c.stream_id == stream_id)
        if kind is not None:
            query = query.where(snapshots.c.kind == kind)
        if status is not None:
            query = query.where(snapshots.c.status == status.value)
        if older_than is not None:
            same_time = (snapshots.c.created_at_ms == older_than.created_at_ms) & (
                snapshots.c.snapshot_id < older_than.snapshot_id
            )
            # The first condition alone is what the index can use.
            query = query.where(
                snapshots.c.created_at_ms <= older_than.created_at_ms,
                or_(snapshots.c.created_at_ms < older_than.created_at_ms, same_time),
            )
        query = query.order_by(snapshots.c.created_at_ms.desc(), snapshots.c.snapshot_id.desc()).limit(limit + 1)
        with self._database.reading() as connection:
            found = [read_snapshot(row) for row in connection.execute(query)]
        shown = tuple(found[:limit])
        has_more = len(found) > limit and shown
        return HistoryPage(shown, HistoryCursor(shown[-1].created_at_ms, shown[-1].snapshot_id) if has_more else None)

    def figures(self, stream_id: str, *, limit: int) -> list[SnapshotFigures]:
        """Figures of the last completed snapshots of a stream, oldest first.

        Args:
            stream_id: The stream.
            limit: Maximum number of snapshots.
        """
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
        with self._database.reading() as connection:
            return [_figures(row) for row in reversed(connection.execute(query).all())]

    def of_execution(self, stream_id: str, execution_id: str, *, limit: int) -> ExecutionHistory:
        """What one execution of a stream has taken.

        Args:
            stream_id: The stream.
            execution_id: The execution.
            limit: Maximum number of the newest attempts.
        """
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
        """Number of snapshots of a stream by status."""
        query = (
            select(snapshots.c.status, func.count())
            .where(snapshots.c.stream_id == stream_id)
            .group_by(snapshots.c.status)
        )
        with self._database.reading() as connection:
            return {str(status): int(count) for status, count in connection.execute(query)}

    def branches(self, stream_id: str) -> list[Branch]:
        """The origins of a stream's timelines, newest first; the first timeline has none."""
        query = (
            select(timelines.c.timeline, timelines.c.parent, timelines.c.to_batch)
            .where(timelines.c.stream_id == stream_id)
            .order_by(timelines.c.timeline.desc())
        )
        with self._database.reading() as connection:
            return [Branch(*row) for row in connection.execute(query)]


def _figures(row: Row[Any]) -> SnapshotFigures:
    stored = {name: getattr(row, name) for name in _STORED}
    watermark_ms = watermark_ms_of(row.watermark)
    return SnapshotFigures(
        **stored,
        watermark_delay_ms=max(row.completed_at_ms - watermark_ms, 0) if watermark_ms is not None else None,
    )
