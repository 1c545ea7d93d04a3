"""Failed recovery points of streams: a recovery ends once all points failed, across processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, func, select

from dagster_ckpt.catalog.database import Database
from dagster_ckpt.catalog.records import EventType, LeaseRecord
from dagster_ckpt.catalog.tables import recovery_failures


@dataclass(frozen=True)
class PointFailure:
    """A recovery that failed at one of the stream's recovery points.

    Attributes:
        point: Name of the `RecoveryPoint`.
        is_certain: A retry cannot succeed.
        rewound_batches: Batches that going back there reprocesses, if known; `rewound_ms` as a time span.
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


class RecoveryRecords:
    def __init__(self, database: Database) -> None:
        self._database = database

    def failed(
        self,
        lease: LeaseRecord,
        execution_id: str,
        point: str,
        *,
        error: str,
        detail: str,
        is_certain: bool,
        batch_id: int | None,
        rewound_batches: int | None = None,
        rewound_ms: int | None = None,
    ) -> None:
        """Record a `PointFailure`."""
        stream_id = lease.stream_id
        with self._database.writing_under(lease) as connection:
            of_stream = recovery_failures.c.stream_id == stream_id
            ordinal = connection.execute(select(func.max(recovery_failures.c.ordinal)).where(of_stream)).scalar() or 0
            values = {
                "point": point,
                "error": error,
                "detail": detail[:_LONGEST_DETAIL],
                "is_certain": is_certain,
                "batch_id": batch_id,
                "rewound_batches": rewound_batches,
                "rewound_ms": rewound_ms,
            }
            connection.execute(
                recovery_failures.insert().values(
                    stream_id=stream_id,
                    ordinal=ordinal + 1,
                    execution_id=execution_id,
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
        counting = (recovery_failures.c.stream_id == stream_id) & recovery_failures.c.is_over.is_(False)
        with self._database.reading() as connection:
            rows = connection.execute(
                select(recovery_failures).where(counting).order_by(recovery_failures.c.ordinal)
            ).all()
        return [_record(row) for row in rows]

    def of_streams(self, stream_ids: Sequence[str]) -> dict[str, list[PointFailure]]:
        """`of_stream` for several streams; those without a failure are omitted."""
        counting = recovery_failures.c.stream_id.in_(stream_ids) & recovery_failures.c.is_over.is_(False)
        query = select(recovery_failures).where(counting)
        found: dict[str, list[PointFailure]] = {}
        with self._database.reading() as connection:
            for row in connection.execute(query.order_by(recovery_failures.c.stream_id, recovery_failures.c.ordinal)):
                found.setdefault(row.stream_id, []).append(_record(row))
        return found

    def forget(self, lease: LeaseRecord) -> None:
        """Treat every point as untried, after a user intervened."""
        of_stream = recovery_failures.c.stream_id == lease.stream_id
        with self._database.writing_under(lease) as connection:
            connection.execute(recovery_failures.update().where(of_stream).values(is_over=True))


def _record(row: Row[Any]) -> PointFailure:
    values = dict(row._mapping)
    del values["stream_id"], values["is_over"]
    return PointFailure(**values)
