"""The points that recoveries have failed at: the memory that ends a recovery, across processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, func, select

from dagster_ckpt.catalog.database import Database
from dagster_ckpt.catalog.records import EventType, LeaseRecord
from dagster_ckpt.catalog.recovery_records import PointFailure
from dagster_ckpt.catalog.tables import recovery_failures

# What Spark says may hold a whole stack.
_LONGEST_DETAIL = 4_000


class RecoveryStore:
    """What the catalog knows of recoveries that failed."""

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
        """Record that a recovery failed at a point.

        Args:
            lease: The lease of the stream.
            execution_id: The execution that failed there.
            point: Name of the point.
            error: Class of the error.
            detail: What was found, for a person.
            is_certain: Whether another try cannot do better.
            batch_id: The batch of that point, or None.
            rewound_batches: How many batches going back there costs, or None where that is not known.
            rewound_ms: How much time, or None.

        Raises:
            LeaseLostError: The lease is not held any more.
        """
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
        """Failures since the last checkpoint that came after one, or since a person last started the stream."""
        counting = (recovery_failures.c.stream_id == stream_id) & recovery_failures.c.is_over.is_(False)
        with self._database.reading() as connection:
            rows = connection.execute(
                select(recovery_failures).where(counting).order_by(recovery_failures.c.ordinal)
            ).all()
        return [_record(row) for row in rows]

    def of_streams(self, stream_ids: Sequence[str]) -> dict[str, list[PointFailure]]:
        """The same of several streams, by one query; one without a failure is left out."""
        counting = recovery_failures.c.stream_id.in_(stream_ids) & recovery_failures.c.is_over.is_(False)
        query = select(recovery_failures).where(counting)
        found: dict[str, list[PointFailure]] = {}
        with self._database.reading() as connection:
            for row in connection.execute(query.order_by(recovery_failures.c.stream_id, recovery_failures.c.ordinal)):
                found.setdefault(row.stream_id, []).append(_record(row))
        return found

    def forget(self, lease: LeaseRecord) -> None:
        """Let every point count as not yet tried: a person has looked after the stream.

        Raises:
            LeaseLostError: The lease is not held any more.
        """
        of_stream = recovery_failures.c.stream_id == lease.stream_id
        with self._database.writing_under(lease) as connection:
            connection.execute(recovery_failures.update().where(of_stream).values(is_over=True))


def _record(row: Row[Any]) -> PointFailure:
    values = dict(row._mapping)
    del values["stream_id"], values["is_over"]
    return PointFailure(**values)
