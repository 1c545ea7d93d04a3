"""Exports a snapshot as a checkpoint directory for plain Spark.

Whether plain Spark continues exactly depends on where each sink is: the file sink and Delta skip batches that they
have, and nothing rolls them back. So each sink is reported, and rows of file sinks can be copied.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dagster_ckpt.client.description import find_snapshot
from dagster_ckpt.errors import CkptError, OptionError
from dagster_ckpt.io.location import folders_overlap, same_folder
from dagster_ckpt.recovery.fork import give_outputs
from dagster_ckpt.recovery.live_directories import restore_into, snapshot_location
from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.sinks.registry import logs_in_snapshot, sinks_in
from dagster_ckpt.sinks.sink import Replay, Sink, SinkEffect, newest_batch
from dagster_ckpt.snapshot.writer import Progress
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry
from dagster_ckpt.spark.checkpoint_dir.inspect import CheckpointDescription, describe_checkpoint
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import has_living_holder
from dagster_ckpt.stream.ownership import OWNER
from dagster_ckpt.stream.snapshots import describe_snapshot, holding


@dataclass(frozen=True)
class ExportedSink:
    name: str
    continues_at: str
    is_ready: bool
    explanation: str


@dataclass(frozen=True)
class Export:
    """Result of `Client.export`; `found` is the exported directory as plain Spark finds it."""

    stream_id: str
    snapshot: str
    found: CheckpointDescription
    sinks: tuple[ExportedSink, ...]
    is_running: bool = True

    def messages(self) -> list[str]:
        advice = f"do not start {self.stream_id} again once the exported query has run"
        if self.is_running:
            advice = f"stop {self.stream_id} before you start the exported query"
        return [
            f"exported {self.snapshot} of {self.stream_id} to {self.found.url}",
            *self.found.messages(),
            *(f"sink {sink.name}: {sink.explanation}" for sink in self.sinks),
            f"{advice}: both are the same query and write to the same sinks",
        ]


def export_snapshot(
    stream: StreamHandle,
    reference: str,
    to: str,
    *,
    outputs: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Export:
    snapshot = find_snapshot(stream.catalog, stream.stream_id, reference)
    location, target = snapshot_location(snapshot), LiveDirectory(to)
    for place in (stream.live_root, location):
        if folders_overlap(to, place):
            raise OptionError(
                f"{to} overlaps {place}, which streams manage: retention would delete the exported directory. Export "
                "to a folder elsewhere."
            )
    _refuse_to_replace(target.sibling(".partial"))
    given = dict(outputs or {})
    with holding(stream.catalog, [snapshot], f"export {uuid.uuid4()}"):
        if _is_left_over(target):
            target.delete()
        logs = logs_in_snapshot(stream.store, location)
        properties = stream.store.manifest(location).header.properties
        restore_into(stream, location, target, marked=True, progress=progress)
        try:
            # The new folders belong to no stream, so there is no lease to check.
            give_outputs(logs, given, snapshot.batch_id or 0, contextlib.nullcontext)
        except BaseException:
            target.delete()
            raise
        found = describe_checkpoint(target)
        sinks = tuple(_exported(sink, found, properties, logs, given) for sink in sinks_in(properties))
        # Marked last: until then a repeated export replaces what an interrupted one left.
        target.note_in_use()
    is_running = has_living_holder(stream.catalog, stream.stream_id)
    return Export(stream.stream_id, describe_snapshot(snapshot), found, sinks, is_running)


def _refuse_to_replace(unfinished: LiveDirectory) -> None:
    # `unfinished` may be the user's. In an object store, the export is built in its final place.
    is_used = unfinished.folder.can_rename
    if is_used and unfinished.exists() and not unfinished.is_not_in_use() and unfinished.folder.list(hidden=True):
        raise OptionError(
            f"{unfinished.url} exists, and no interrupted export has left it. The exported directory is built there "
            "before it gets its name: move it away, or export to another folder."
        )


def _is_left_over(target: LiveDirectory) -> bool:
    """Whether an interrupted export left it: it is marked, and in no folder of live directories."""
    parent = LiveDirectory(target.url.rstrip("/").rpartition("/")[0])
    return target.exists() and target.is_not_in_use() and OWNER not in parent.folder.list()


def _exported(
    sink: Sink,
    found: CheckpointDescription,
    properties: Mapping[str, object],
    logs: Mapping[str, Sequence[SinkEntry]],
    given: Mapping[str, str],
) -> ExportedSink:
    place = sink.place or sink.name
    new = next((new for old, new in given.items() if same_folder(old, place)), None)
    if new is not None:
        why = f"its rows up to batch {found.batch_id} were copied to {new}, with their log: write there"
        return ExportedSink(sink.name, new, is_ready=True, explanation=why)
    asked = sink.rolls_back or sink.knows_queries
    try:
        last = newest_batch(sink, found.query_id) if asked else None
    except CkptError as error:
        return ExportedSink(sink.name, place, is_ready=False, explanation=f"its newest batch is unknown: {error}")
    if isinstance(sink, FileSink):
        is_ready, why = _at_the_log(last, found.batch_id)
        return ExportedSink(sink.name, place, is_ready=is_ready, explanation=why)
    if sink.rolls_back and last is not None and last > found.batch_id:
        # Even if the rows were undone since, Delta remembers the batch.
        why = (
            f"it has had batches up to {last} of this query, and nothing but this package rolls it back: plain Spark "
            f"may skip batches {found.batch_id + 1} to {last} and lose their rows. Export the newest snapshot of the "
            "stopped stream; to go back, start the stream from this snapshot, stop it with a savepoint, and export "
            "that one"
        )
        return ExportedSink(sink.name, place, is_ready=False, explanation=why)
    if last is not None and last <= found.batch_id:
        why = f"it has batches up to {last} of this query: write there"
        return ExportedSink(sink.name, place, is_ready=True, explanation=why)
    in_flight = properties.get("in_flight_batch")
    replay = Replay(
        to_batch=found.batch_id,
        query_id=found.query_id,
        in_flight=in_flight if isinstance(in_flight, int) else None,
        log_entries=dict(logs),
        query_ids=(found.query_id,),
    )
    forecast = sink.forecast(replay)
    why = f"{forecast.effect}. {forecast.reason} {forecast.advice}".rstrip()
    # A table without a batch of this query skips none.
    is_ready = sink.rolls_back and sink.knows_queries and forecast.effect is SinkEffect.EXACT
    return ExportedSink(sink.name, place, is_ready=is_ready, explanation=why)


def _at_the_log(last: int | None, batch_id: int) -> tuple[bool, str]:
    if last is not None and last > batch_id:
        return False, (
            f"its log is at batch {last}, so plain Spark would skip batches {batch_id + 1} to {last} and lose their "
            f"rows. Export the newest snapshot of the stopped stream, or copy the rows up to batch {batch_id} to a new "
            "folder with outputs"
        )
    if last is None or last < batch_id:
        log = "it has no log" if last is None else f"its log ends at batch {last}"
        return False, (
            f"{log}, and so it lacks the rows of batches {0 if last is None else last + 1} to {batch_id}, which plain "
            "Spark does not write again. Export a snapshot that was taken since the sink went back, or copy the rows "
            f"up to batch {batch_id} to a new folder with outputs"
        )
    return True, f"its log is at batch {last}, where the exported query continues: write there"
