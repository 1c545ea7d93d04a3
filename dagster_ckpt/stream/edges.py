"""Edges between streams: which source reads which sink of another stream, and up to which batch.

The log of a file sink (`_spark_metadata`) shows which batch wrote a file, the commits of a Delta or Iceberg table name
query and batch, and the transactional Kafka sink commits where its batches begin. The batch is determined when a
snapshot is taken: a compacted log no longer distinguishes batches.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from functools import cached_property, lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import SOURCE_IDENTITIES, ExecutionRecord, StreamRecord
from dagster_ckpt.errors import CkptError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.location import Folder, as_expression, folder_of, open_file_io, spelled
from dagster_ckpt.sinks.delta import DeltaTable
from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.sinks.file_sink_log import LOG, bare, files_of_batch, log_entries, needed_entries
from dagster_ckpt.sinks.iceberg import IcebergTable
from dagster_ckpt.sinks.kafka.sink import KafkaSink, TransactionalKafkaSink
from dagster_ckpt.sinks.kafka.undone import NOTE
from dagster_ckpt.sinks.registry import sink_of, sinks_of
from dagster_ckpt.sinks.sink import ReadOfSink, Sink
from dagster_ckpt.spark.checkpoint_dir.file_source import COMPACT, SourceFile, files_after, files_in_entries
from dagster_ckpt.spark.checkpoint_dir.layout import OFFSETS, SOURCES, LiveDirectory, NeededFile
from dagster_ckpt.spark.checkpoint_dir.logs import parse_log_lines, parse_offset_entry, read_offset_entry
from dagster_ckpt.spark.query.kafka_source import may_match
from dagster_ckpt.spark.query.output import KafkaPlace
from dagster_ckpt.spark.query.sources import (
    CLUSTER,
    DELTA,
    FILE,
    ICEBERG,
    KAFKA,
    PATH,
    PATTERN,
    TABLE,
    TABLE_ID,
    TOPIC_ID,
    SourceIdentity,
    identities_of_record,
    keyed,
)
from dagster_ckpt.stream.known_sinks import clusters_of_sinks, identities_of_sinks, query_ids_in

# Property of a snapshot: how far each source has read the sinks of other streams.
READS = "reads"
_GLOB = frozenset("*?[{")
_TABLES: Mapping[str, type[Sink]] = {DELTA: DeltaTable, ICEBERG: IcebergTable}
_WHY_BATCH = "a batch asset is between them, and what it has read is"
_BY_OFFSET = frozenset({*_TABLES, KAFKA})


class EdgeKind(StrEnum):
    """What shows the newest batch that a source has read of a sink, as the module says.

    UNKNOWN: Nothing, for the reason in `why`.
    """

    FILES = "FILES"
    TABLE = "TABLE"
    TOPIC = "TOPIC"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class Edge:
    """A source of `reader` reads a sink of `upstream`; `offset_names` are those of `SourceIdentity`."""

    reader: str
    source: str
    upstream: str
    sink: str
    kind: EdgeKind
    why: str = ""
    options: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    offset_names: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def offsets_in(self, entry: Mapping[str, str | None]) -> dict[str, str | None]:
        """Return the offsets of the source by name: one for each use of it."""
        return {name: entry[name] for name in self.offset_names or (self.source,) if name in entry}

    def offset_in(self, entry: Mapping[str, str | None]) -> str | None:
        # Spark continues at the last one.
        return next(reversed(self.offsets_in(entry).values()), None)

    def __str__(self) -> str:
        source = f", source {self.source}," if self.source else ""
        return f"{self.reader}{source} from {self.sink} of {self.upstream}"


@dataclass(frozen=True)
class Read:
    """How far a source has read a sink of another stream.

    Attributes:
        timeline: The upstream's at that time.
        batch: The upstream's newest batch that was read; None if none was. An upper bound where the log of the sink is
            compacted and its earlier entries are deleted.
        undone: Files, or batches in a table, that were read and undone by a roll-back of the upstream since.
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
    try:
        return _READS.validate_python(properties[READS])
    except (KeyError, ValidationError):
        return None


def reads_as_record(reads: Iterable[Read]) -> list[dict[str, Any]]:
    return [{**vars(each), "kind": each.kind.value} for each in reads]


@dataclass(frozen=True)
class Output:
    """A sink that a stream writes to.

    Attributes:
        table_id: If it is a table or topic, as its catalog, log or cluster names it.
        cluster: If it is a topic, the id of its cluster.
    """

    stream: str
    sink: Sink
    table_id: str | None = None
    cluster: str | None = None

    @cached_property
    def folder(self) -> Folder:
        return folder_of(self.sink.place or "")

    @cached_property
    def path(self) -> str:
        return spelled(self.sink.place or "")

    @cached_property
    def name(self) -> str:
        return name_of_sink(self.sink)


class Outputs:
    """The outputs of all streams, indexed by what a source may know them by.

    Args:
        sinks: Of each stream, as Spark names them.
        ids: The ids of those that are tables or topics.
        clusters: The ids of the clusters of those that are topics.
    """

    def __init__(
        self,
        sinks: Mapping[str, Sequence[str]],
        ids: Mapping[str, Mapping[str, str]],
        clusters: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self._all = [
            Output(stream, sink, ids.get(stream, {}).get(sink.name), (clusters or {}).get(stream, {}).get(sink.name))
            for stream, names in sinks.items()
            for sink in sinks_of(names)
            if sink.place
        ]
        self._numbers: defaultdict[tuple[_Key, str], list[int]] = defaultdict(list)
        for number, output in enumerate(self._all):
            for key in _keys_of_output(output):
                self._numbers[key].append(number)
        self._topics = {output.name for output in self._all if _is_topic(output.sink)}

    def candidates(self, identity: SourceIdentity, folder: Folder | None) -> Iterable[Output]:
        """Those that a source may read; every one that it does read is among them."""
        path = identity.identity.get(PATH, "")
        if not _GLOB.isdisjoint(path):
            folder = folder_of(_before_pattern(path))
        keys, pattern = _keys_of_source(identity, folder), _open_pattern(identity)
        if pattern is not None:
            keys |= {(_Key.NAME, name) for name in self._topics if may_match(pattern, name)}
        found = {number for key in keys for number in self._numbers.get(key, ())}
        return (self._all[number] for number in sorted(found))


class _Key(Enum):
    AT = auto()
    BELOW = auto()
    NAME = auto()
    TABLE = auto()


def _keys_of_output(output: Output) -> set[tuple[_Key, str]]:
    below = {(_Key.BELOW, name) for name in output.folder.within}
    names = {(_Key.NAME, name) for name in (output.sink.place, output.name) if name}
    tables = {(_Key.TABLE, output.table_id)} if output.table_id else set()
    return {(_Key.AT, output.folder.name), *below, *names, *tables}


def _keys_of_source(identity: SourceIdentity, folder: Folder | None) -> set[tuple[_Key, str]]:
    known = identity.identity
    names = {(_Key.NAME, name) for name in (known.get(TABLE), *identity.topics) if name}
    tables = {(_Key.TABLE, table_id)} if (table_id := known.get(TABLE_ID)) else set()
    places = {(_Key.BELOW, folder.name), *((_Key.AT, name) for name in folder.within)} if folder is not None else set()
    return {*names, *tables, *places}


def edges_of(reader: str, sources: Mapping[str, SourceIdentity], outputs: Outputs) -> list[Edge]:
    """Edges into one stream."""
    edges = []
    for key, identity in sources.items():
        path = identity.identity.get(PATH)
        folder = folder_of(path) if path is not None else None
        for output in outputs.candidates(identity, folder):
            found = _relation(identity, folder, output) if output.stream != reader else None
            if found is not None:
                named = output.stream, output.sink.name
                edges.append(Edge(reader, key, *named, *found, identity.options, identity.offset_names))
    return edges


def edges_in(catalog: Catalog) -> list[Edge]:
    written = catalog.executions.newest_by_other("")
    streams = catalog.streams.all()
    ids = {stream.stream_id for stream in streams}
    through_batches = [
        Edge(reader, "", each.upstream, f"asset {each.asset}", EdgeKind.UNKNOWN, _WHY_BATCH)
        for reader, execution in written.items()
        for each in execution.batch_inputs
        if each.upstream in ids
    ]
    outputs = _outputs_of(written)
    sources = catalog.executions.last_sources_of_all()
    direct = [
        edge
        for stream in streams
        for edge in edges_of(
            stream.stream_id,
            _keyed(sources[stream.stream_id] if stream.stream_id in sources else _restored(catalog, stream)),
            outputs,
        )
    ]
    return [*direct, *through_batches]


def edges_to(catalog: Catalog, reader: str, sources: Mapping[str, SourceIdentity]) -> list[Edge]:
    return edges_of(reader, sources, _outputs_of(catalog.executions.newest_by_other(reader))) if sources else []


def _outputs_of(executions: Mapping[str, ExecutionRecord]) -> Outputs:
    sinks = {stream: list(each.sinks) for stream, each in executions.items()}
    return Outputs(
        sinks,
        {stream: identities_of_sinks(each) for stream, each in executions.items()},
        {stream: clusters_of_sinks(each) for stream, each in executions.items()},
    )


def recorded_sources(catalog: Catalog, stream: StreamRecord) -> dict[str, SourceIdentity]:
    return _keyed(last_identities(catalog, stream))


def _keyed(recorded: Any | None) -> dict[str, SourceIdentity]:
    identities = identities_of_record(recorded)
    return keyed(identities) if identities is not None else {}


def last_identities(catalog: Catalog, stream: StreamRecord) -> Any | None:
    """Return the identities of a stream's sources as they were recorded last; None if they never were."""
    found = catalog.executions.last_sources(stream.stream_id, stream.live_directory)
    return found if found is not None else _restored(catalog, stream)


def _restored(catalog: Catalog, stream: StreamRecord) -> Any | None:
    """As a snapshot records them: the stream was restored, or its catalog rebuilt, and has not started since."""
    restored = catalog.snapshots.by_id([stream.restored_snapshot_id or ""]).get(stream.restored_snapshot_id or "")
    snapshot = restored or catalog.history.newest_of([stream.stream_id]).get(stream.stream_id)
    return snapshot.properties.get(SOURCE_IDENTITIES) if snapshot is not None else None


def _relation(identity: SourceIdentity, folder: Folder | None, output: Output) -> tuple[EdgeKind, str] | None:
    """None if the source, which reads `folder` if it reads files, does not read the output."""
    path, sink, place = identity.identity.get(PATH), output.sink, output.sink.place or ""
    if identity.kind in _TABLES and isinstance(sink, _TABLES[identity.kind]):
        is_table = output.table_id is not None and identity.identity.get(TABLE_ID) == output.table_id
        is_named = identity.identity.get(TABLE) == place or (folder is not None and folder.name == output.folder.name)
        return (EdgeKind.TABLE, "") if is_table or is_named else None
    if path is None or folder is None:
        pattern = _open_pattern(identity) if _is_topic(sink) else None
        is_matched = pattern is not None and may_match(pattern, output.name)
        is_named = output.name in {identity.identity.get(TABLE), *identity.topics}
        if not (is_named or is_matched) or _is_another_topic(identity, output):
            return None
        is_exact = isinstance(sink, TransactionalKafkaSink) and identity.kind == KAFKA
        return (EdgeKind.TOPIC, "") if is_exact else (EdgeKind.UNKNOWN, _why_unknown(identity.kind, sink))
    if not _GLOB.isdisjoint(path):
        is_read = _overlapping(path).fullmatch(output.path) is not None
        return (EdgeKind.UNKNOWN, f"the files of the pattern {path} are") if is_read else None
    if not folder.overlaps(output.folder):
        return None
    if not isinstance(sink, FileSink) or identity.kind != FILE:
        return EdgeKind.UNKNOWN, _why_unknown(identity.kind, sink)
    if folder.name == output.folder.name:
        return EdgeKind.FILES, ""
    return EdgeKind.UNKNOWN, f"the files of {path}, which is not exactly the folder of the sink, are"


def _before_pattern(path: str) -> str:
    """Return the innermost folder of all files of a pattern."""
    before = re.split(r"[*?\[{\\]", path, maxsplit=1)[0]
    return before[: before.rfind("/") + 1]


@lru_cache(maxsize=4096)
def _overlapping(pattern: str) -> re.Pattern[str]:
    """Return what matches the folders in which files of a pattern may be, those above, and those below it."""
    path = spelled(pattern)
    above = [path[: at.start()] for at in re.finditer("/", path)]
    try:
        return re.compile("|".join([*map(as_expression, above), f"{as_expression(path)}(/.*)?"]))
    except re.error:
        return re.compile(f"{re.escape(spelled(_before_pattern(pattern)))}.*")


def _is_topic(sink: Sink) -> bool:
    return isinstance(sink, KafkaSink | TransactionalKafkaSink)


def _open_pattern(identity: SourceIdentity) -> str | None:
    """Return the pattern of a source's topics if Kafka did not say which they are: each that may match counts."""
    return identity.identity.get(PATTERN) if not identity.topics else None


def _is_another_topic(identity: SourceIdentity, output: Output) -> bool:
    """Whether a topic of the same name is known to be of another cluster."""
    clusters = identity.identity.get(CLUSTER), output.cluster
    if None not in clusters:
        # In one cluster the name decides: a topic that was deleted and created again since one side was recorded has
        # two ids. Kafka deleted its markers with it, so no source skips what was undone in the former topic.
        return clusters[0] != clusters[1]
    ids = _topic_id(identity.identity.get(f"{TOPIC_ID}{output.name}")), _topic_id(output.table_id)
    return None not in ids and ids[0] != ids[1]


def _topic_id(text: str | None) -> str | None:
    """Return an id as Java's client writes it; None if unknown, as all zeros are."""
    found = (text or "").rstrip("=").replace("+", "-").replace("/", "_")
    return found if found.strip("A") else None


def name_of_sink(sink: Sink) -> str:
    if not _is_topic(sink):
        return sink.place or ""
    place = KafkaPlace.parse(sink.place or "")
    return place.topic if place is not None else (sink.place or "").rpartition("/")[2]


def _why_unknown(kind: str, sink: Sink) -> str:
    if isinstance(sink, KafkaSink):
        return "the topic may have a batch twice (at least once), and which batch a record is of is"
    return f"the position in a source of kind {kind} is"


def reads_of(catalog: Catalog, edges: Iterable[Edge], entries: Mapping[str, bytes]) -> list[Read]:
    """How far sources have read, given the entries of their logs and the newest of the offset log, by path."""
    of_source: dict[str, dict[str, bytes]] = {}
    plans: dict[int, Mapping[str, str | None]] = {}
    for path, data in entries.items():
        log, _, name = path.partition("/")
        if log == OFFSETS:
            plans[int(name)] = parse_offset_entry(data, path).sources
        else:
            of_source.setdefault(name.partition("/")[0], {})[path] = data
    offsets = plans[max(plans)] if plans else {}
    return [
        _read_files(catalog, edge, files_in_entries(of_source.get(edge.source, {})))
        if edge.kind is EdgeKind.FILES
        else _read_offset(catalog, edge, edge.offset_in(offsets), _note_in(of_source.get(edge.source, {})))
        for edge in edges
    ]


def reads_of_live(catalog: Catalog, edges: Iterable[Edge], live: LiveDirectory) -> list[Read]:
    known = [each for each in edges if each.kind is not EdgeKind.UNKNOWN]
    newest = live.positions().offset if any(each.kind is not EdgeKind.FILES for each in known) else None
    offsets = read_offset_entry(live.folder, newest).sources if newest is not None else {}
    return [
        _read_files(catalog, edge, files_after(live.folder, edge.source, -1))
        if edge.kind is EdgeKind.FILES
        else _read_offset(catalog, edge, edge.offset_in(offsets), note_of(live, edge.source))
        for edge in known
    ]


def note_of(live: LiveDirectory, source: str) -> bytes | None:
    path = f"{SOURCES}/{source}/{NOTE}"
    return live.folder.read(path) if live.folder.size(path) is not None else None


def _note_in(entries: Mapping[str, bytes]) -> bytes | None:
    return next((data for path, data in entries.items() if path.endswith(f"/{NOTE}")), None)


def reads_at_cut(
    catalog: Catalog, stream_id: str, identities: object, files: Iterable[NeededFile]
) -> dict[str, list[dict[str, Any]]]:
    found = identities_of_record(identities)
    if found is None:
        return {}
    sources = {key: each for key, each in keyed(found).items() if each.kind in _BY_OFFSET or _reads_a_sink(each)}
    edges = [each for each in edges_to(catalog, stream_id, sources) if each.kind is not EdgeKind.UNKNOWN]
    logs = tuple({log for each in edges for log in _logs_read(each)})
    entries = {each.path: each.read() for each in files if each.path.startswith(logs)} if edges else {}
    return {READS: reads_as_record(reads_of(catalog, edges, entries))}


def _logs_read(edge: Edge) -> list[str]:
    """Return prefixes of the paths that show how far a source has read."""
    of_source = f"{SOURCES}/{edge.source}/"
    if edge.kind is EdgeKind.FILES:
        return [of_source]
    return [f"{OFFSETS}/", *([f"{of_source}{NOTE}"] if edge.kind is EdgeKind.TOPIC else [])]


def _reads_a_sink(source: SourceIdentity) -> bool:
    """Whether the folder has the log of a file sink. Few have, which spares the catalog."""
    path = source.identity.get(PATH)
    if path is None or source.kind != FILE or not _GLOB.isdisjoint(path):
        return False
    try:
        return bool(open_file_io(path).list(LOG))
    except (CkptError, OSError):
        return True


def _read_files(catalog: Catalog, edge: Edge, files: Sequence[SourceFile]) -> Read:
    def find(sink: Sink, upstream: StreamRecord) -> ReadOfSink:
        times = {bare(each.path): each.modified_at_ms for each in files}
        batch, listed = newest_batch(times, str(sink.place), to_the_end=upstream.may_have_gone_back)
        return ReadOfSink(batch, len(undone_files(times, listed, upstream, catalog)))

    return _read(catalog, edge, find)


def _read_offset(catalog: Catalog, edge: Edge, offset: str | None, note: bytes | None) -> Read:
    def find(sink: Sink, upstream: StreamRecord) -> ReadOfSink:
        if offset is None:
            return ReadOfSink()
        own = query_ids_in(catalog, edge.upstream)
        found = sink.read_up_to(offset, own, edge.options, rewound=upstream.may_have_gone_back, note=note)
        return found if found is not None else ReadOfSink(why="the position, as the source logs it, is")

    return _read(catalog, edge, find)


def _read(catalog: Catalog, edge: Edge, find: Callable[[Sink, StreamRecord], ReadOfSink]) -> Read:
    def unknown(why: str) -> Read:
        return Read(edge.source, edge.upstream, edge.sink, EdgeKind.UNKNOWN, why)

    try:
        before = catalog.streams.get(edge.upstream)
        found = find(sink_of(edge.sink), before)
        after = catalog.streams.get(edge.upstream)
    except (CkptError, OSError) as error:
        return unknown(f"the log of the sink could not be read ({error}), and the position is")
    if before.pending_restore is not None or before.timeline != after.timeline:
        return unknown(f"{edge.upstream} was being restored, and the position is")
    if found.why:
        return unknown(found.why)
    return Read(
        source=edge.source,
        upstream=edge.upstream,
        sink=edge.sink,
        kind=edge.kind,
        timeline=before.timeline,
        batch=found.batch,
        undone=found.undone,
    )


Times = Mapping[str, int | None]


def newest_batch(read: Times, folder: str, *, to_the_end: bool = True) -> tuple[int | None, dict[str, int | None]]:
    """The newest batch of a file sink that wrote any of these files, and the files that its log lists.

    Without `to_the_end`, no more of the log is read than needed.
    """
    if not read:
        return None, {}
    root = open_file_io(folder)
    names = log_entries(root)
    found, newest = dict[str, int | None](), None
    for number in reversed(needed_entries(names)):
        files = _files(root, names[number]) if number in names else {}
        found |= files
        if newest is None and files.keys() & read.keys():
            newest = _in_compact(folder, number, set(read)) if names[number].endswith(COMPACT) else number
        if newest is not None and not to_the_end:
            break
    return newest, found


def undone_files(read: Times, listed: Times, upstream: StreamRecord, catalog: Catalog) -> set[str]:
    """Files that a roll-back of the upstream stream removed from the log of its sink.

    Unless the upstream began empty, files older than those in the log do not count: the sink's own retention dropped
    them.
    """
    if not upstream.may_have_gone_back:
        return set()
    # The whole history is asked: a rewind or restore after an empty start has another origin.
    began_empty = catalog.history.began_anew(upstream)
    oldest = None if began_empty else min((each for each in listed.values() if each is not None), default=None)
    return {
        name for name, time in read.items() if name not in listed and (oldest is None or time is None or time >= oldest)
    }


def _in_compact(folder: str, number: int, read: set[str]) -> int:
    for batch in range(number, -1, -1):
        files = files_of_batch(folder, batch)
        # An upper bound if earlier entries were deleted.
        if files is None or {bare(each) for each in files} & read:
            return batch
    return number


def _files(root: FileIO, name: str) -> dict[str, int | None]:
    lines = parse_log_lines(root.read(f"{LOG}/{name}"), f"{root.url}/{LOG}/{name}")
    times = {bare(str(each.get("path"))): each.get("modificationTime") for each in lines}
    return {path: time if isinstance(time, int) else None for path, time in times.items()}
