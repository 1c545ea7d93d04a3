"""The sinks of a stream: which it wrote to, what the catalog records of them, and damaged logs.

`sink_ids`, in an execution's progress and a snapshot's properties, maps the name of a table or topic to its id, the
stream's newest batch in it and, of a topic, the id of its cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.pending_restore import SinkRollBack, ToBatch
from dagster_ckpt.catalog.records import ExecutionRecord, OriginKind, SnapshotRecord, StreamRecord
from dagster_ckpt.errors import CkptError, StorageAccessError
from dagster_ckpt.io.location import same_folder
from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.sinks.file_sink_repair import DamagedLog, damaged_log, is_moved_log, relocated
from dagster_ckpt.sinks.kafka.sink import TransactionalKafkaSink, topic_end
from dagster_ckpt.sinks.kafka.undone import TopicEnd
from dagster_ckpt.sinks.registry import captured_sinks, described_sink, logs_in_snapshot, sink_of, sinks_in, sinks_of
from dagster_ckpt.sinks.sink import Sink
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.stream.handle import StreamHandle

SINK_IDS = "sink_ids"
# Property of a savepoint: where its batches end in topics, by sink.
TOPIC_ENDS = "topic_ends"


@dataclass(frozen=True)
class KnownSink:
    """What is recorded of a table or topic.

    Attributes:
        batch: The stream's newest batch in it at that time, if any.
        goes_on: The stream has written there since, so later commits are there too.
    """

    identity: str | None
    batch: int | None = None
    goes_on: bool = False

    def expected(self, batch_id: int) -> int | None:
        if self.goes_on:
            return batch_id
        return None if self.batch is None else min(batch_id, self.batch)


def seen_sinks(sinks: Sequence[Sink], query_ids: Collection[str]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for sink in sinks:
        with suppress(CkptError):
            found = sink.look(query_ids)
            if found is not None:
                cluster = {"cluster": found.cluster} if found.cluster is not None else {}
                seen[sink.name] = {"id": found.identity, "batch": found.batch, **cluster}
    return seen


def topic_ends(sinks: Sequence[Sink], query_ids: Collection[str], query_id: str, batch: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for sink in sinks:
        with suppress(CkptError):
            end = (
                topic_end(sink.topic, query_ids, query_id, batch) if isinstance(sink, TransactionalKafkaSink) else None
            )
            if end is not None:
                found[sink.name] = end.as_record()
    return {TOPIC_ENDS: found} if found else {}


def topic_end_in(properties: Mapping[str, Any], sink: Sink) -> TopicEnd | None:
    ends = properties.get(TOPIC_ENDS)
    return next(
        (
            TopicEnd.of_record(record)
            for name, record in (ends.items() if isinstance(ends, dict) else ())
            if sink.is_same(sink_of(str(name)))
        ),
        None,
    )


def known_in(record: Mapping[str, Any], sink: Sink) -> KnownSink | None:
    entries = record.get(SINK_IDS)
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        if isinstance(entry, dict) and sink.is_same(sink_of(str(name))):
            identity, batch = entry.get("id"), entry.get("batch")
            return KnownSink(identity if isinstance(identity, str) else None, batch if isinstance(batch, int) else None)
    return None


def known_of_executions(executions: Sequence[ExecutionRecord], sink: Sink) -> KnownSink | None:
    """What executions, newest first, recorded of a sink; None if the stream wrote elsewhere, or otherwise, last."""
    records = [each.progress or {} for each in executions]
    identity = next((known.identity for each in records if (known := known_in(each, sink)) is not None), None)
    for record in records:
        names = record.get("sinks")
        if not isinstance(names, list) or not names:
            continue
        # A `foreachBatch` function may leave out batches that the table's own sink would have written.
        if not sink.is_among([each for each in sinks_of([str(name) for name in names]) if type(each) is type(sink)]):
            return None
        if isinstance(record.get("batch_id"), int):
            return KnownSink(identity, record["batch_id"], goes_on=True)
        known = known_in(record, sink)
        if known is not None:
            return known
    return None


def with_newest_batch(progress: Mapping[str, Any]) -> dict[str, Any]:
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
    properties = snapshot.properties or (
        stream.store.manifest(snapshot.location).header.properties if snapshot.location else {}
    )
    return tuple(sink.name for sink in sinks_in(properties))


def query_ids_of(stream: StreamHandle) -> list[str]:
    return query_ids_in(stream.catalog, stream.stream_id)


def query_ids_in(catalog: Catalog, stream_id: str) -> list[str]:
    """All ids that the query of a stream has had, the present one last."""
    known = {snapshot.query_id for snapshot in catalog.snapshots.of_stream(stream_id)}
    known |= {(each.progress or {}).get("query_id") for each in catalog.executions.of_stream(stream_id)}
    record = catalog.streams.get(stream_id)
    if isinstance(record.pending_restore, SinkRollBack):
        known |= set(record.pending_restore.query_ids)
    if record.live_directory is not None:
        present = live_query_id(LiveDirectory(record.live_directory))
        return [*sorted(str(each) for each in known - {None, present}), *([present] if present is not None else [])]
    return sorted(str(each) for each in known if each is not None)


def identities_of_sinks(execution: ExecutionRecord) -> dict[str, str]:
    return _of_sinks(execution, "id")


def clusters_of_sinks(execution: ExecutionRecord) -> dict[str, str]:
    return _of_sinks(execution, "cluster")


def _of_sinks(execution: ExecutionRecord, field: str) -> dict[str, str]:
    found = (execution.progress or {}).get(SINK_IDS)
    entries = found.items() if isinstance(found, dict) else ()
    return {str(name): str(each[field]) for name, each in entries if isinstance(each, dict) and each.get(field)}


def damaged_sink_logs(
    stream: StreamHandle, record: StreamRecord, output: NamedOutput | None, live: LiveDirectory | None
) -> list[DamagedLog]:
    """Damaged logs that only this stream writes, and that a snapshot of its timeline captured.

    The survey of the sinks refuses any other.
    """
    if not isinstance(record.pending_restore, ToBatch | None):
        # An interrupted start continues with the sinks regardless of their logs.
        return []
    written = sinks_of(sinks_written(stream))
    described = described_sink(output)
    others = sinks_of(stream.catalog.executions.sinks_of_others(stream.stream_id))
    damaged = []
    # A query that writes files always names their folder.
    named = written if output is None else [described] if described is not None else []
    for sink in named:
        if not isinstance(sink, FileSink) or not sink.is_among(written) or sink.is_among(others):
            continue
        captured = _captured(stream, sink.folder)
        # Read before the log: a query writes there before it commits.
        committed = live.positions().commit if live is not None else None
        # The query may have compacted the log meanwhile, if it still runs elsewhere.
        if captured and damaged_log(sink.folder, captured, committed) is not None:
            found = damaged_log(sink.folder, captured, committed)
            damaged += [found] if found is not None else []
    return damaged


def lacks_the_log(snapshot: SnapshotRecord, damaged: Sequence[DamagedLog]) -> str | None:
    captured = captured_sinks(snapshot.properties)
    if captured is None:
        return None
    for log in damaged:
        if not FileSink.at(log.folder).is_among(captured):
            return f"it has not captured the log of {log.folder}, which is damaged"
    return None


def with_moved_logs(logs: Mapping[str, Sequence[SinkEntry]], sinks: Sequence[Sink]) -> dict[str, Sequence[SinkEntry]]:
    found = dict(logs)
    for sink in sinks:
        if not isinstance(sink, FileSink) or any(same_folder(place, sink.folder) for place in logs):
            continue
        for place, entries in logs.items():
            if is_moved_log(sink.folder, entries):
                found[sink.folder] = relocated(entries, place, sink.folder)
                break
    return found


def is_moved_output(stream: StreamHandle, sink: FileSink, ours: Sequence[Sink]) -> bool:
    folders = [each.folder for each in ours if isinstance(each, FileSink)]
    return any(is_moved_log(sink.folder, _captured(stream, folder)) for folder in folders)


def _captured(stream: StreamHandle, folder: str) -> Sequence[SinkEntry]:
    for snapshot in stream.catalog.snapshots.restorable(stream.stream_id):
        try:
            logs: Mapping[str, Any] = logs_in_snapshot(stream.store, snapshot.location or "")
        except StorageAccessError:
            raise
        except CkptError:
            # Damaged or deleted: an older one may have it too.
            continue
        entries: Sequence[SinkEntry] = next(
            (entries for place, entries in logs.items() if same_folder(place, folder)), ()
        )
        if entries:
            return entries
    return ()
