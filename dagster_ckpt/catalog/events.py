"""Event outbox: events in commit order, for readers with a cursor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Row, and_, func, select

from dagster_ckpt.catalog.database import Database, as_dict, cells
from dagster_ckpt.catalog.records import EventRecord, EventType
from dagster_ckpt.catalog.tables import event_counter, events, streams

_KNOWN = {event.value: event for event in EventType}


class EventRecords:
    """Events. Sequence numbers have no gaps, so a reader's cursor never skips one."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def after(self, sequence: int, *, limit: int = 1000) -> list[EventRecord]:
        """In order; 0: all."""
        query = select(events).where(events.c.sequence > sequence).order_by(events.c.sequence).limit(limit)
        with self._database.reading() as connection:
            return [_record(row) for row in connection.execute(query)]

    def last_of(
        self, stream_ids: Sequence[str], types: Collection[EventType], *, up_to: int, each: int
    ) -> dict[str, list[EventRecord]]:
        """Oldest first; `each` is the number for each stream."""
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
        with self._database.reading() as connection:
            for row in connection.execute(query):
                found[row.stream_id].append(_record(row))
        return found

    def latest_sequence(self) -> int:
        with self._database.reading() as connection:
            return int(connection.execute(select(event_counter.c.last_sequence)).scalar_one())


def _record(row: Row[Any]) -> EventRecord:
    values = cells(row, events, [])
    values["type"] = _KNOWN.get(values["type"], EventType.UNKNOWN)
    values["payload"] = as_dict(values["payload"])
    return EventRecord(**values)
