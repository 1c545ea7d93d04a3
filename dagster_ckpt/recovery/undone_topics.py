"""Lets a stream continue behind what its upstream has undone in a Kafka topic, before it reads that.

An offset log has one position for each partition. So a stream that has not read all records before these first runs a
batch that ends where they begin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.errors import RestoreError, StorageAccessError
from dagster_ckpt.sinks.kafka.sink import TransactionalKafkaSink, written_topic
from dagster_ckpt.sinks.kafka.undone import NOTE, NextRead, next_read, noted
from dagster_ckpt.sinks.registry import sink_of
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import StillMine
from dagster_ckpt.spark.checkpoint_dir.layout import OFFSETS, SOURCES, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import (
    parse_offset_entry,
    plan_without_data,
    read_offset_entry,
    with_offsets,
)
from dagster_ckpt.spark.query.sources import SourceIdentity, keyed
from dagster_ckpt.stream.edges import Edge, EdgeKind, edges_to, name_of_sink, note_of, reads_in
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import query_ids_in, topic_end_in
from dagster_ckpt.values.safe_parsing import from_json


def continue_behind_topics(
    stream: StreamHandle,
    live: LiveDirectory,
    sources: Sequence[SourceIdentity],
    still_mine: StillMine,
    run_planned: Callable[[int], None],
    *,
    accept_loss: bool,
) -> list[str]:
    """Let sources skip undone records; return a message for each that skips or cannot. Repeatable.

    Args:
        run_planned: Runs the planned batch of the live directory, and no other.

    Raises:
        RestoreError: The upstream stream went back, and has not started since; or it is unknown which offsets to move.
    """
    catalog = stream.catalog
    to_stream = edges_to(catalog, stream.stream_id, keyed(sources))
    edges = [each for each in to_stream if each.kind is EdgeKind.TOPIC and catalog.history.begins(each.upstream)]
    messages: list[str] = []
    while True:
        ahead = [
            found
            for edge in edges
            if (found := _ahead(stream, edge, live, to_stream, sources, accept_loss=accept_loss)) is not None
        ]
        obstacles = [
            f"{each.edge}: it continues to read, although {each.next.obstacle}" for each in ahead if each.next.obstacle
        ]
        up_to = [each for each in ahead if each.next.up_to is not None]
        behind = [each for each in ahead if each.next.behind is not None]
        positions = live.positions()
        if positions.commit is None or not (up_to or behind):
            return [*messages, *obstacles]
        if up_to:
            batch = positions.commit + 1
            if positions.offset == positions.commit:
                with still_mine():
                    _plan_up_to(live, positions.commit, up_to, now_ms=catalog.now_ms())
            run_planned(batch)
            sinks = ", ".join(dict.fromkeys(each.edge.sink for each in up_to))
            messages.append(f"batch {batch} ends where the undone records of {sinks} begin")
        for each in () if up_to else behind:
            with still_mine():
                _set_behind(live, positions.commit, each)
            messages.append(f"source {each.edge.source} continues behind what was undone in {each.edge.sink}")


@dataclass(frozen=True)
class _Ahead:
    edge: Edge
    topic: str
    read: Mapping[int, int]
    next: NextRead


def _ahead(
    stream: StreamHandle,
    edge: Edge,
    live: LiveDirectory,
    to_stream: Sequence[Edge],
    sources: Sequence[SourceIdentity],
    *,
    accept_loss: bool,
) -> _Ahead | None:
    catalog, sink, positions = stream.catalog, sink_of(edge.sink), live.positions()
    if not isinstance(sink, TransactionalKafkaSink) or positions.commit is None:
        return None
    read = _offsets(live, positions.commit, edge, sink)
    if read is None:
        return None
    own = query_ids_in(catalog, edge.upstream)
    try:
        written = written_topic(sink.topic, own)
    except StorageAccessError as error:
        if _could_ask(catalog, edge) and not accept_loss:
            raise
        return _Ahead(edge, sink.topic.topic, read, NextRead(obstacle=f"it cannot ask what was undone: {error}"))
    if own and own[-1] not in written.queries:
        if not accept_loss and _is_about_to_be_undone(catalog, edge, sink, read):
            raise RestoreError(
                f"Stream {edge.reader!r} is not started: it reads {edge.sink} of stream {edge.upstream!r}, which went "
                f"back and has not started since. Start {edge.upstream} first, or start with accept_loss to read "
                "records that it undoes."
            )
        return None
    if "assign" not in edge.options:
        # Spark reads a new partition from its beginning.
        read = {**{partition: 0 for partition, ranges in written.undone.items() if ranges}, **read}
    planned = positions.offset if positions.offset != positions.commit else None
    ends = _offsets(live, planned, edge, sink) if planned is not None else None
    found = next_read(read, ends, written.undone)
    others = other_writers(edge, to_stream) if found.up_to or found.behind else []
    if others:
        found = NextRead(obstacle=f"{others[0]} writes to the topic too")
    why = _why_uncertain(live, positions.commit, sources) if found.up_to or found.behind else ""
    if why and not accept_loss:
        raise RestoreError(
            f"Stream {edge.reader!r} is not started: it would skip what {edge.upstream!r} has undone in {edge.sink}, "
            f"but {why}. Start the query that ran this batch, with the same sources, each used as often; or start with "
            "accept_loss to read the undone records."
        )
    found = NextRead(obstacle=why) if why else found
    return _Ahead(edge, sink.topic.topic, read, found) if found != NextRead() else None


def _why_uncertain(live: LiveDirectory, commit: int, sources: Sequence[SourceIdentity]) -> str:
    """Why it is not certain which offsets are of which source; if one were not moved, Spark may continue there."""
    named = {name for key, each in keyed(sources).items() for name in each.offset_names or (key,)}
    logged = read_offset_entry(live.folder, commit).sources.keys()
    is_read_twice = any(each.offset_names for each in sources)
    # Spark may have added a source with a name since, unless others are read twice.
    if logged == named or (logged < named and not is_read_twice):
        return ""
    return f"batch {commit} has the offsets {', '.join(sorted(logged))}, and its query {', '.join(sorted(named))}"


def other_writers(edge: Edge, edges: Sequence[Edge]) -> list[str]:
    """Return other streams that write, or may write, to the topic, between undone records."""
    # A source reads one cluster, and no edge leads to a topic that is known to be of another.
    topic = name_of_sink(sink_of(edge.sink))
    return [
        each.upstream
        for each in edges
        if each.upstream != edge.upstream
        and (each.reader, each.source) == (edge.reader, edge.source)
        and name_of_sink(sink_of(each.sink)) == topic
    ]


def _could_ask(catalog: Catalog, edge: Edge) -> bool:
    """Whether the reader's process had access to the topic when it took its newest snapshot."""
    newest = next(iter(catalog.snapshots.restorable(edge.reader)), None)
    reads = reads_in(newest.properties) if newest is not None else None
    return any(
        each.kind is EdgeKind.TOPIC and (each.source, each.upstream) == (edge.source, edge.upstream)
        for each in reads or ()
    )


def _is_about_to_be_undone(catalog: Catalog, edge: Edge, sink: TransactionalKafkaSink, read: Mapping[int, int]) -> bool:
    """Whether a reader may read records that the next start of their writer undoes."""
    restored = catalog.streams.get(edge.upstream).restored_snapshot_id or ""
    snapshot = catalog.snapshots.by_id([restored]).get(restored)
    end = topic_end_in(snapshot.properties, sink) if snapshot is not None else None
    return end is not None and all(at <= end.ends.get(partition, 0) for partition, at in read.items())


def _offsets(live: LiveDirectory, batch: int, edge: Edge, sink: TransactionalKafkaSink) -> dict[int, int] | None:
    return sink.offsets_in(edge.offset_in(read_offset_entry(live.folder, batch).sources))


def _plan_up_to(live: LiveDirectory, commit: int, ahead: Sequence[_Ahead], *, now_ms: int) -> None:
    """Plan a batch that reads these sources up to the undone records, and no others."""
    path = f"{OFFSETS}/{commit + 1}"
    entry = plan_without_data(live.folder, commit, now_ms=now_ms)
    for each in ahead:
        entry = _at(entry, f"{live.url}/{path}", each, each.next.up_to or {})
    live.folder.write(path, [entry])
    live.folder.flush(OFFSETS)


def _at(entry: bytes, where: str, ahead: _Ahead, offsets: Mapping[int, int]) -> bytes:
    sources = parse_offset_entry(entry, where).sources
    # A source may read other topics too.
    position = from_json(ahead.edge.offset_in(sources) or "{}")
    position[ahead.topic] = {str(partition): at for partition, at in offsets.items()}
    return with_offsets(entry, where, dict.fromkeys(ahead.edge.offsets_in(sources), position))


def _set_behind(live: LiveDirectory, commit: int, ahead: _Ahead) -> None:
    behind = ahead.next.behind or {}
    folder, path = live.folder, f"{OFFSETS}/{commit}"
    note = noted(note_of(live, ahead.edge.source), ahead.topic, ahead.read, behind)
    entry = _at(folder.read(path), f"{live.url}/{path}", ahead, behind)
    # The note first: without the position, it is written again.
    folder.write(f"{SOURCES}/{ahead.edge.source}/{NOTE}", [note])
    # Hadoop's checksum is of the old content.
    folder.delete(f"{OFFSETS}/.{commit}.crc")
    folder.write(path, [entry])
    folder.flush(OFFSETS)
