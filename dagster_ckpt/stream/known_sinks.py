"""The sinks of a stream: which it wrote to, and what the catalog records of its tables and topics.

`sink_ids`, in an execution's progress and a snapshot's properties, has for each sink by name the id of its table or
topic, and the stream's newest batch in it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dagster_ckpt.catalog.pending_restore import SinkRollBack
from dagster_ckpt.catalog.records import ExecutionRecord, OriginKind, SnapshotRecord
from dagster_ckpt.errors import CkptError
from dagster_ckpt.sinks.registry import sink_of, sinks_in, sinks_of
from dagster_ckpt.sinks.sink import Sink
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.handle import StreamHandle

SINK_IDS = "sink_ids"


@dataclass(frozen=True)
class KnownSink:
    """What is recorded of a table or topic.

    Attributes:
        batch: The stream's newest batch in it at that time, if any.
        goes_on: The stream has written there since, so what it committed later is there too.
    """

    identity: str | None
    batch: int | None = None
    goes_on: bool = False

    def expected(self, batch_id: int) -> int | None:
        """The newest batch up to this one that it must have."""
        if self.goes_on:
            return batch_id
        return None if self.batch is None else min(batch_id, self.batch)


def seen_sinks(sinks: Sequence[Sink], query_ids: Collection[str]) -> dict[str, Any]:
    """`sink_ids` for tables and topics as they are now, without unavailable ones."""
    seen: dict[str, Any] = {}
    for sink in sinks:
        with suppress(CkptError):
            found = sink.look(query_ids)
            if found is not None:
                seen[sink.name] = {"id": found.identity, "batch": found.batch}
    return seen


def known_in(record: Mapping[str, Any], sink: Sink) -> KnownSink | None:
    """From an execution's progress or a snapshot's properties."""
    entries = record.get(SINK_IDS)
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        if isinstance(entry, dict) and sink.is_same(sink_of(str(name))):
            identity, batch = entry.get("id"), entry.get("batch")
            return KnownSink(identity if isinstance(identity, str) else None, batch if isinstance(batch, int) else None)
    return None


def known_of_executions(executions: Sequence[ExecutionRecord], sink: Sink) -> KnownSink | None:
    """From executions, newest first; None if the stream wrote elsewhere last."""
    records = [each.progress or {} for each in executions]
    identity = next((known.identity for each in records if (known := known_in(each, sink)) is not None), None)
    for record in records:
        names = record.get("sinks")
        if not isinstance(names, list) or not names:
            continue
        if not sink.is_among(sinks_of([str(name) for name in names])):
            return None
        if isinstance(record.get("batch_id"), int):
            return KnownSink(identity, record["batch_id"], goes_on=True)
        known = known_in(record, sink)
        if known is not None:
            return known
    return None


def with_newest_batch(progress: Mapping[str, Any]) -> dict[str, Any]:
    """`sink_ids` with the newest batch that the execution reported."""
    entries = progress.get(SINK_IDS)
    newest = progress.get("batch_id")
    kept = {str(name): entry for name, entry in entries.items()} if isinstance(entries, dict) else {}
    return {name: {**entry, "batch": newest} if isinstance(newest, int) else entry for name, entry in kept.items()}


def sinks_written(stream: StreamHandle) -> list[str]:
    """The sinks of the newest execution or, between a restore and the next start, of the snapshot."""
    record = stream.catalog.streams.get(stream.stream_id)
    origin = record.origin
    if origin is not None and origin.kind is OriginKind.DIRECTORY:
        origin = origin.earlier
    reported = stream.catalog.executions.last_sinks(stream.stream_id)
    if origin is None or not origin.sinks:
        return reported
    if any(
        each.live_directory == record.live_directory for each in stream.catalog.executions.of_stream(stream.stream_id)
    ):
        return reported
    return list(origin.sinks)


def sinks_of_snapshot(stream: StreamHandle, snapshot: SnapshotRecord) -> tuple[str, ...]:
    """As Spark names them."""
    properties = snapshot.properties or (
        stream.store.manifest(snapshot.location).header.properties if snapshot.location else {}
    )
    return tuple(sink.name for sink in sinks_in(properties))


def query_ids_of(stream: StreamHandle) -> list[str]:
    known = {snapshot.query_id for snapshot in stream.catalog.snapshots.of_stream(stream.stream_id)}
    known |= {(each.progress or {}).get("query_id") for each in stream.catalog.executions.of_stream(stream.stream_id)}
    record = stream.catalog.streams.get(stream.stream_id)
    if isinstance(record.pending_restore, SinkRollBack):
        known |= set(record.pending_restore.query_ids)
    if record.live_directory is not None:
        known.add(live_query_id(LiveDirectory(record.live_directory)))
    return sorted(str(each) for each in known if each is not None)
