"""What recoveries need: the journal of planned batches with their source offsets, and points where recoveries failed.

A start replays batches from the journal: see `recovery/replay.py`.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, select

from dagster_ckpt.catalog.database import Records, as_text
from dagster_ckpt.catalog.records import EventType, LeaseRecord, SnapshotStatus
from dagster_ckpt.catalog.tables import planned_batches, recovery_failures, snapshots
from dagster_ckpt.values.modes import SnapshotKind
from dagster_ckpt.values.safe_parsing import from_json

_AT_MOST = 10_000
# The key of a number of rows among paths, none of which begins like this.
_ROWS = "#rows"


@dataclass(frozen=True)
class PlannedBatch:
    """A batch that Spark planned.

    Attributes:
        follows: SHA-256 of the previous offset log entry; empty for the first batch.
        files: Path in the live directory to content: its offset log entry, and source log entries.
        is_committed: Whether its commit is known; every batch before the newest is committed anyway.
    """

    batch_id: int
    follows: str
    files: Mapping[str, bytes]
    is_committed: bool = False
    rows: int | None = None


class JournalRecords(Records):
    def note(self, lease: LeaseRecord, batches: list[PlannedBatch]) -> None:
        """Record ascending batches, which replace all recorded ones from the first of them on."""
        stream_id, of_stream = lease.stream_id, planned_batches.c.stream_id == lease.stream_id
        with self._database.writing_under(lease) as connection:
            again = planned_batches.c.batch_id >= batches[0].batch_id
            unneeded = _is_unneeded(stream_id, batches[-1].batch_id)
            connection.execute(planned_batches.delete().where(of_stream & (again | unneeded)))
            connection.execute(
                planned_batches.insert(),
                [
                    {
                        "stream_id": stream_id,
                        "batch_id": batch.batch_id,
                        "follows": batch.follows,
                        "files": _packed(batch),
                        "is_committed": batch.is_committed,
                    }
                    for batch in batches
                ],
            )

    def note_rows(self, lease: LeaseRecord, rows: Mapping[int, int]) -> None:
        batches = (planned_batches.c.stream_id == lease.stream_id) & planned_batches.c.batch_id.in_(rows)
        with self._database.writing_under(lease) as connection:
            for row in connection.execute(select(planned_batches).where(batches)).all():
                batch = _record(row)
                if batch is not None:
                    this = batches & (planned_batches.c.batch_id == row.batch_id)
                    files = _packed(replace(batch, rows=rows[row.batch_id]))
                    connection.execute(planned_batches.update().where(this).values(files=files))

    def forget_after(self, lease: LeaseRecord, batch_id: int) -> None:
        with self._database.writing_under(lease) as connection:
            forget_after(connection, lease.stream_id, batch_id)

    def of_batch(self, stream_id: str, batch_id: int) -> PlannedBatch | None:
        """Return a recorded batch; None if it is missing or unreadable."""
        this = (planned_batches.c.stream_id == stream_id) & (planned_batches.c.batch_id == batch_id)
        with self._database.reading() as connection:
            row = connection.execute(select(planned_batches).where(this)).one_or_none()
        return _record(row) if row is not None else None

    def newest(self, stream_id: str) -> int | None:
        of_stream = planned_batches.c.stream_id == stream_id
        with self._database.reading() as connection:
            found: int | None = connection.execute(
                select(func.max(planned_batches.c.batch_id)).where(of_stream)
            ).scalar()
        return found

    def after(self, stream_id: str, batch_id: int) -> list[PlannedBatch]:
        """The batches planned right after one, up to a gap or an unreadable entry."""
        wanted = (planned_batches.c.stream_id == stream_id) & (planned_batches.c.batch_id > batch_id)
        found: list[PlannedBatch] = []
        for row in self._database.rows(select(planned_batches).where(wanted).order_by(planned_batches.c.batch_id)):
            batch = _record(row) if row.batch_id == batch_id + len(found) + 1 else None
            if batch is None:
                break
            found.append(batch)
        return found


def forget_after(connection: Connection, stream_id: str, batch_id: int | None) -> None:
    undone = planned_batches.c.stream_id == stream_id
    if batch_id is not None:
        undone &= planned_batches.c.batch_id > batch_id
    connection.execute(planned_batches.delete().where(undone))


def _is_unneeded(stream_id: str, newest: int) -> ColumnElement[bool]:
    """Whether every checkpoint has the batch, or the journal is too long."""
    checkpoints = (
        (snapshots.c.stream_id == stream_id)
        & (snapshots.c.kind == SnapshotKind.CHECKPOINT.value)
        & (snapshots.c.status == SnapshotStatus.COMPLETED.value)
    )
    oldest = select(func.min(snapshots.c.batch_id)).where(checkpoints).scalar_subquery()
    return (planned_batches.c.batch_id <= oldest) | (planned_batches.c.batch_id <= newest - _AT_MOST)


def _packed(batch: PlannedBatch) -> str:
    # In base64, because PostgreSQL's text takes no zero byte.
    packed = {path: base64.b64encode(zlib.compress(data)).decode() for path, data in batch.files.items()}
    return as_text({**packed, **({_ROWS: batch.rows} if batch.rows is not None else {})})


def _record(row: Row[Any]) -> PlannedBatch | None:
    try:
        packed = from_json(row.files)
        rows = packed.pop(_ROWS, None)
        files = {str(path): zlib.decompress(base64.b64decode(data)) for path, data in packed.items()}
    except (AttributeError, TypeError, ValueError, zlib.error):
        return None
    return PlannedBatch(row.batch_id, row.follows, files, row.is_committed, rows if type(rows) is int else None)


@dataclass(frozen=True)
class PointFailure:
    """A recovery that failed at one of the stream's recovery points.

    Attributes:
        is_certain: A retry cannot succeed. False only in rows of earlier versions.
        rewound_batches: Batches that a start from there processes again, if known; `rewound_ms` as a time span.
    """

    ordinal: int
    execution_id: str
    point: str
    error: str
    detail: str
    is_certain: bool
    batch_id: int | None
    at_ms: int
    rewound_batches: int | None = None
    rewound_ms: int | None = None


# Spark's messages may contain a stack trace.
_LONGEST_DETAIL = 4_000


class RecoveryRecords(Records):
    def failed(
        self,
        lease: LeaseRecord,
        execution_id: str,
        point: str,
        *,
        error: str,
        detail: str,
        batch_id: int | None,
        rewound_batches: int | None = None,
        rewound_ms: int | None = None,
    ) -> None:
        stream_id = lease.stream_id
        with self._database.writing_under(lease) as connection:
            of_stream = recovery_failures.c.stream_id == stream_id
            ordinal = connection.execute(select(func.max(recovery_failures.c.ordinal)).where(of_stream)).scalar() or 0
            values = {
                "point": point,
                "error": error,
                "detail": detail[:_LONGEST_DETAIL],
                "batch_id": batch_id,
                "rewound_batches": rewound_batches,
                "rewound_ms": rewound_ms,
            }
            connection.execute(
                recovery_failures.insert().values(
                    stream_id=stream_id,
                    ordinal=ordinal + 1,
                    execution_id=execution_id,
                    is_certain=True,
                    is_over=False,
                    at_ms=self._database.now_ms(connection),
                    **values,
                )
            )
            self._database.record_event(
                connection, stream_id, EventType.RECOVERY_FAILED, execution_id=execution_id, payload=values
            )

    def of_stream(self, stream_id: str) -> list[PointFailure]:
        """Failures that no later checkpoint and no start by a user has resolved, oldest first."""
        return self.of_streams([stream_id]).get(stream_id, [])

    def of_streams(self, stream_ids: Sequence[str]) -> dict[str, list[PointFailure]]:
        counting = recovery_failures.c.stream_id.in_(stream_ids) & recovery_failures.c.is_over.is_(False)
        query = select(recovery_failures).where(counting)
        found: dict[str, list[PointFailure]] = {}
        for row in self._database.rows(query.order_by(recovery_failures.c.stream_id, recovery_failures.c.ordinal)):
            found.setdefault(row.stream_id, []).append(_failure(row))
        return found

    def forget(self, lease: LeaseRecord) -> None:
        """Treat every point as untried, after a user intervened."""
        of_stream = recovery_failures.c.stream_id == lease.stream_id
        with self._database.writing_under(lease) as connection:
            connection.execute(recovery_failures.update().where(of_stream).values(is_over=True))


def _failure(row: Row[Any]) -> PointFailure:
    values = dict(row._mapping)
    del values["stream_id"], values["is_over"]
    return PointFailure(**values)
