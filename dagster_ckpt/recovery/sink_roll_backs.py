"""Sinks follow the state that a start goes back to: what is rolled back, how far, and what is settled first.

Each of these steps can be repeated. The catalog records what remains to be done until all of them are, so that
the next start finishes what was interrupted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from dagster_ckpt.errors import SnapshotCorruptError
from dagster_ckpt.recovery.sink_logs import with_moved_logs
from dagster_ckpt.recovery.sink_survey import BEFORE_THE_FIRST_BATCH, Survey
from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.sinks.file_sink_log import begin_log
from dagster_ckpt.sinks.guard import Verdict
from dagster_ckpt.sinks.in_flight import settle_in_flight
from dagster_ckpt.sinks.registry import sinks_of
from dagster_ckpt.sinks.sink import RollBack, Sink, newest_batch, roll_back
from dagster_ckpt.sinks.snapshot_sinks import captured_sinks, logs_in_snapshot, sinks_in
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry, StillMine
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import query_ids_of
from dagster_ckpt.stream.lease import LeaseKeeper


def undo_facts(stream: StreamHandle, query_id: str | None, *, may_repeat: bool = False) -> dict[str, Any]:
    """What the roll-back of the sinks has to know, also if it is finished by another start."""
    return {"query_id": query_id, "query_ids": query_ids_of(stream), "may_repeat": may_repeat}


def roll_back_point(
    stream: StreamHandle, batch_id: int, undo: Mapping[str, Any], entries: Sequence[SinkEntry] | None = None
) -> RollBack:
    """Where a sink goes back to.

    Args:
        stream: The stream.
        batch_id: The batch that stays.
        undo: What `undo_facts` returned when the directory was switched.
        entries: The sink's log as the snapshot has it, for a sink with one.
    """
    return RollBack(
        batch_id,
        entries,
        undo.get("query_id"),
        undo.get("query_ids", ()),
        may_repeat=bool(undo.get("may_repeat")),
        roll_back_tables=stream.options.roll_back_tables,
    )


def is_skipped_under(query_id: str | None, batch_id: int | None, sinks: Survey) -> bool:
    """Whether a sink would skip the next batches of this query although they are undone."""
    after = BEFORE_THE_FIRST_BATCH if batch_id is None else batch_id
    remembering = [sink for sink in sinks.of(Verdict.ROLL_BACK) if sink.remembers_undone]
    newest = (newest_batch(sink, query_id) for sink in remembering)
    return any(batch is not None and batch > after for batch in newest)


def allowed_sinks(sinks: Sequence[Sink], survey: Survey) -> list[Sink]:
    """Those of a stream's previous sinks that may be rolled back."""
    return [sink for sink in sinks if sink.rolls_back and survey.allows(sink)]


def places_of(sinks: Iterable[Sink]) -> tuple[str, ...]:
    """Places of sinks, or the names of those without one."""
    return tuple(sink.place or sink.name for sink in sinks)


def begin_logs(sinks: Survey, still_mine: StillMine) -> None:
    """Write an empty log where a file sink begins in a folder without one, up to the batch that the state has."""
    batch_id = sinks.aim.batch_id
    for sink in sinks.of(Verdict.BEGIN):
        if isinstance(sink, FileSink):
            begin_log(sink.folder, batch_id, still_mine=still_mine)


def settle_batch_in_flight(stream: StreamHandle, live: LiveDirectory, sinks: Survey, lease: LeaseKeeper) -> list[Sink]:
    """Undo a batch that sinks have and the query does not have; returns the sinks that were rolled back."""
    return settle_in_flight(
        live,
        sinks.to_settle,
        still_mine=lease.step,
        roll_back_tables=stream.options.roll_back_tables,
        # A table keeps the number of an undone batch: a replay would take the batch for one whose rows are there.
        before_roll_back=partial(stream.catalog.journal.forget_after, lease.record),
    )


def roll_back_pending(
    stream: StreamHandle, pending: Mapping[str, Any], survey: Survey, still_mine: StillMine
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Roll back what the start may roll back; returns the places, and the names of the sinks that it cannot."""
    logs: dict[str, Sequence[SinkEntry]] = {}
    if "location" in pending:
        location = str(pending["location"])
        header = stream.store.manifest(location).header
        if captured_sinks(header.properties) is None:
            raise SnapshotCorruptError(
                f"{location} does not record which sinks its query wrote to. Restore another snapshot."
            )
        logs = with_moved_logs(logs_in_snapshot(stream.store, location), survey.of(Verdict.ROLL_BACK))
        sinks, batch_id = sinks_in(header.properties), header.batch_id
        # What the stream wrote to since then.
        sinks += [sink for sink in survey.of(Verdict.ROLL_BACK) if not sink.is_among(sinks)]
    else:
        sinks = sinks_of([str(sink) for sink in pending.get("sinks", ())])
        batch_id = int(pending.get("batch_id", BEFORE_THE_FIRST_BATCH))
    allowed = allowed_sinks(sinks, survey)
    for sink in allowed:
        entries = logs.get(sink.place) if sink.place is not None else None
        roll_back(sink, roll_back_point(stream, batch_id, pending, entries), still_mine)
    return places_of(allowed), tuple(sink.name for sink in sinks if not sink.rolls_back)
