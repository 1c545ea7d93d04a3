"""Edges between streams: which source of a stream reads which sink of another one, and how far it has read.

A file source reads a file sink by its log (`_spark_metadata`), so the newest batch that it has read follows from the
names of the files. It is determined when a snapshot is taken: a compacted log no longer tells batches apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import StreamRecord
from dagster_ckpt.errors import CkptError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.location import folders_overlap, open_file_io, same_folder
from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.sinks.file_sink_log import LOG, bare, files_of_batch, listed, log_entries, needed_entries
from dagster_ckpt.sinks.registry import sinks_of
from dagster_ckpt.sinks.sink import Sink
from dagster_ckpt.spark.checkpoint_dir.file_source import COMPACT, files_after, files_in_entries
from dagster_ckpt.spark.checkpoint_dir.layout import SOURCES, LiveDirectory, NeededFile
from dagster_ckpt.spark.query.sources import FILE, PATH, TABLE, TOPICS, SourceIdentity, identities_of_record, keyed

# Property of a snapshot: how far each source has read the sinks of other streams.
READS = "reads"
_GLOB = frozenset("*?[{")


class EdgeKind(StrEnum):
    """FILES: a source reads a file sink by its log, so the newest batch is known. UNKNOWN: it is not; `why` says so."""

    FILES = "FILES"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class Edge:
    """A source of stream `reader` reads a sink of stream `upstream`."""

    reader: str
    source: str
    upstream: str
    sink: str
    kind: EdgeKind
    why: str = ""

    def __str__(self) -> str:
        return f"{self.reader}, source {self.source}, from {self.sink} of {self.upstream}"


@dataclass(frozen=True)
class Read:
    """How far a source has read a sink of another stream.

    Attributes:
        timeline: Of the upstream stream at that time.
        batch: The upstream's newest batch that was read; None if none was. An upper bound where the log of the sink
            is compacted and its earlier entries are deleted.
        undone: Files that were read and that the upstream's log no longer lists, because it was rolled back.
    """

    source: str
    upstream: str
    sink: str
    kind: EdgeKind
    why: str = ""
    timeline: int = 0
    batch: int | None = None
    undone: int = 0


_READS = TypeAdapter(tuple[Read, ...])


def reads_in(properties: Mapping[str, Any]) -> tuple[Read, ...] | None:
    """None if a snapshot does not record them."""
    try:
        return _READS.validate_python(properties[READS])
    except (KeyError, ValidationError):
        return None


def edges_of(reader: str, sources: Mapping[str, SourceIdentity], sinks: Mapping[str, Sequence[str]]) -> list[Edge]:
    """The edges to one stream. `sinks` are those of all streams, as Spark names them."""
    return [
        Edge(reader, key, upstream, sink.name, *found)
        for key, identity in sources.items()
        for upstream, names in sinks.items()
        if upstream != reader
        for sink in sinks_of(names)
        if (found := _relation(identity, sink)) is not None
    ]


def edges_in(catalog: Catalog) -> list[Edge]:
    """Between all streams of a catalog, from what their newest executions reported."""
    streams = catalog.streams.all()
    sinks = catalog.executions.sinks_by_other("")
    return [edge for stream in streams for edge in edges_of(stream.stream_id, recorded_sources(catalog, stream), sinks)]


def recorded_sources(catalog: Catalog, stream: StreamRecord) -> dict[str, SourceIdentity]:
    identities = identities_of_record(catalog.executions.last_sources(stream.stream_id, stream.live_directory))
    return keyed(identities) if identities is not None else {}


def _relation(identity: SourceIdentity, sink: Sink) -> tuple[EdgeKind, str] | None:
    """None if the source does not read the sink."""
    path, place = identity.identity.get(PATH), sink.place
    if not place:
        return None
    if path is None:
        names = {identity.identity.get(TABLE), *identity.identity.get(TOPICS, "").split(",")}
        return (EdgeKind.UNKNOWN, f"the position in a source of kind {identity.kind} is") if place in names else None
    if _GLOB & set(path):
        folder = place.removeprefix("file:")
        pattern = path.removeprefix("file:")
        matches = fnmatchcase(folder, pattern) or fnmatchcase(f"{folder}/part", pattern)
        return (EdgeKind.UNKNOWN, f"the files of the pattern {path} are") if matches else None
    if not folders_overlap(path, place):
        return None
    if not isinstance(sink, FileSink) or identity.kind != FILE:
        return EdgeKind.UNKNOWN, f"the position in a source of kind {identity.kind} is"
    if same_folder(path, place):
        return EdgeKind.FILES, ""
    return EdgeKind.UNKNOWN, f"the files of {path}, which is not exactly the folder of the sink, are"


def reads_of(catalog: Catalog, edges: Iterable[Edge], entries: Mapping[str, bytes]) -> list[Read]:
    """How far sources have read over edges of kind FILES. `entries` are those of their logs, by path."""
    of_source: dict[str, dict[str, bytes]] = {}
    for path, data in entries.items():
        of_source.setdefault(path.split("/")[1], {})[path] = data
    return [
        _read(catalog, edge, [each.path for each in files_in_entries(of_source.get(edge.source, {}))]) for edge in edges
    ]


def reads_of_live(catalog: Catalog, edges: Iterable[Edge], live: LiveDirectory) -> list[Read]:
    """How far the sources of a query, running or not, have read now over edges of kind FILES."""
    return [
        _read(catalog, edge, [each.path for each in files_after(live.folder, edge.source, -1)])
        for edge in edges
        if edge.kind is EdgeKind.FILES
    ]


def reads_at_cut(
    catalog: Catalog, stream_id: str, identities: object, files: Iterable[NeededFile]
) -> dict[str, list[dict[str, Any]]]:
    """Properties of a snapshot of these files; `identities` are the recorded ones of its sources."""
    found = identities_of_record(identities)
    if found is None:
        return {}
    sources = {key: each for key, each in keyed(found).items() if _reads_a_sink(each)}
    sinks = catalog.executions.sinks_by_other(stream_id) if sources else {}
    edges = [each for each in edges_of(stream_id, sources, sinks) if each.kind is EdgeKind.FILES]
    entries = {each.path: each.read() for each in files if each.path.startswith(f"{SOURCES}/")} if edges else {}
    return {READS: [{**vars(each), "kind": each.kind.value} for each in reads_of(catalog, edges, entries)]}


def _reads_a_sink(source: SourceIdentity) -> bool:
    """Whether the folder has the log of a file sink: few have, and the catalog is asked for these only."""
    path = source.identity.get(PATH)
    if path is None or source.kind != FILE or _GLOB & set(path):
        return False
    try:
        return bool(open_file_io(path).list(LOG))
    except (CkptError, OSError):
        return True


def _read(catalog: Catalog, edge: Edge, paths: Sequence[str]) -> Read:
    sink = sinks_of([edge.sink])[0]
    unknown = Read(edge.source, edge.upstream, edge.sink, EdgeKind.UNKNOWN)
    try:
        before = catalog.streams.get(edge.upstream)
        # The sink's own retention may have dropped files of a stream that was never rewound.
        rewound = before.timeline > 0
        newest, unlisted = newest_batch({bare(path) for path in paths}, str(sink.place), counts_unlisted=rewound)
        after = catalog.streams.get(edge.upstream)
    except (CkptError, OSError) as error:
        return Read(**{**vars(unknown), "why": f"the log of the sink could not be read ({error}), and the position is"})
    if before.pending_restore is not None or before.timeline != after.timeline:
        return Read(**{**vars(unknown), "why": f"{edge.upstream} was being restored, and the position is"})
    return Read(
        source=edge.source,
        upstream=edge.upstream,
        sink=edge.sink,
        kind=EdgeKind.FILES,
        timeline=before.timeline,
        batch=newest,
        undone=unlisted,
    )


def newest_batch(read: set[str], folder: str, *, counts_unlisted: bool = True) -> tuple[int | None, int]:
    """The newest batch of a file sink of which any of these files is, and how many of them its log does not list.

    Without that count, no more of the log is read than needed.
    """
    if not read:
        return None, 0
    root = open_file_io(folder)
    names = log_entries(root)
    unlisted, newest = set(read), None
    for number in reversed(needed_entries(names)):
        files = _files(root, names[number]) if number in names else set()
        if newest is None and files & read:
            newest = _in_compact(folder, number, read) if names[number].endswith(COMPACT) else number
        if newest is not None and not counts_unlisted:
            break
        unlisted -= files
    return newest, len(unlisted) if counts_unlisted else 0


def _in_compact(folder: str, number: int, read: set[str]) -> int:
    for batch in range(number, -1, -1):
        files = files_of_batch(folder, batch)
        # An upper bound if earlier entries were deleted.
        if files is None or {bare(each) for each in files} & read:
            return batch
    return number


def _files(root: FileIO, name: str) -> set[str]:
    return {bare(each) for each in listed(root.read(f"{LOG}/{name}"), f"{root.url}/{LOG}/{name}")}
