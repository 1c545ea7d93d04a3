"""The outbox: what happened, in the order of commits, for readers with a cursor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Row, bindparam, or_, select

from dagster_ckpt.catalog.database import Database, as_dict
from dagster_ckpt.catalog.records import EventRecord, EventType
from dagster_ckpt.catalog.tables import event_counter, events


class EventStore:
    """What happened. Sequences rise without a gap, so a reader's cursor never passes over an event."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def after(self, sequence: int, *, limit: int = 1000) -> list[EventRecord]:
        """Events after a sequence, in order.

        Args:
            sequence: The last event a reader has dealt with; 0 for all.
            limit: At most so many.
        """
        query = select(events).where(events.c.sequence > sequence).order_by(events.c.sequence).limit(limit)
        with self._database.reading() as connection:
            return [_record(row) for row in connection.execute(query)]

    def last_of(
        self, job_ids: Sequence[str], types: Collection[EventType], *, up_to: int, each: int
    ) -> dict[str, list[EventRecord]]:
        """The last events of some types of each of these jobs, oldest first, over one connection.

        Args:
            job_ids: The jobs.
            types: The types.
            up_to: No later sequence than this.
            each: At most so many of each job.
        """
        wanted = (events.c.job_id == bindparam("job")) & (events.c.sequence <= up_to)
        query = (
            select(events)
            # Not in_(): its list is expanded anew for each of many jobs, which takes longer than the query.
            .where(wanted & or_(*(events.c.type == kind.value for kind in types)))
            .order_by(events.c.sequence.desc())
            .limit(each)
        )
        with self._database.reading() as connection:
            return {job: [_record(row) for row in connection.execute(query, {"job": job})][::-1] for job in job_ids}

    def latest_sequence(self) -> int:
        """Sequence of the newest event; 0 where nothing has happened yet."""
        with self._database.reading() as connection:
            return int(connection.execute(select(event_counter.c.last_sequence)).scalar_one())


def _record(row: Row[Any]) -> EventRecord:
    values = dict(row._mapping)
    known = {event.value for event in EventType}
    values["type"] = EventType(values["type"]) if values["type"] in known else EventType.UNKNOWN
    values["payload"] = as_dict(values["payload"])
    return EventRecord(**values)
