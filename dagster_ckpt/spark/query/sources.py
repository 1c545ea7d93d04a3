"""What the sources of a query read (position, kind, identity), and how much input lies between two batches.

Spark records only offsets, so another folder or swapped sources go unnoticed until rows are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from dagster_ckpt.errors import LiveDirectoryError, OptionError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.spark.checkpoint_dir.file_source import files_after, log_offset
from dagster_ckpt.spark.checkpoint_dir.layout import OFFSETS, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry
from dagster_ckpt.spark.query.description import items_of, pairs_of, read_leaves, session_of
from dagster_ckpt.spark.query.kafka_source import kafka_source, topics_of
from dagster_ckpt.spark.query.table_sources import (
    CHANGE_OPTIONS,
    delta_folder,
    delta_offset,
    iceberg_offset,
    iceberg_table,
)
from dagster_ckpt.values.redaction import without_secrets
from dagster_ckpt.values.safe_parsing import from_json, reading

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

FILE, DELTA, ICEBERG, KAFKA = "file", "delta", "iceberg", "kafka"
# Sources whose rows follow from the offset alone.
GENERATED = ("rate", "rate-micro-batch")
PATH, TABLE, TABLE_ID, TOPICS, PATTERN, CLUSTER = "path", "table", "table id", "topics", "pattern", "cluster id"
TOPIC_ID = "id of topic "
# Policies of topics when the query started, by topic.
COMPACTED, RETENTION_MS = "compacted topics", "retention.ms of topic "
# Options that decide what is read; limits of a batch do not.
_DECIDING = {
    FILE: (
        *("pathglobfilter", "recursivefilelookup", "modifiedafter", "modifiedbefore"),
        *("filenameonly", "maxfileage", "cleansource", "sourcearchivedir"),
    ),
    DELTA: tuple(CHANGE_OPTIONS),
    KAFKA: ("kafka.isolation.level", "assign"),
    ICEBERG: ("streaming-skip-overwrite-snapshots", "streaming-skip-delete-snapshots", "branch"),
}
_DEFAULTS = {
    "recursivefilelookup": "false",
    "filenameonly": "false",
    "cleansource": "off",
    "maxfileage": "7d",
    "kafka.isolation.level": "read_uncommitted",
}


@dataclass(frozen=True)
class SourceIdentity:
    """What one source of a query reads.

    Attributes:
        name: The query's name for it (Spark 4.2 and later).
        options: Those that decide what is read and differ from their default.
        side: Its side of the stream-stream joins above it, such as `left/right`; None without joins.
        offset_names: Of its offsets in the offset log, if the query reads a source twice through one DataFrame: one for
            each use. Otherwise it has one, named like its log.
    """

    kind: str
    name: str | None = None
    identity: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    side: str | None = None
    offset_names: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = (self.identity.get(each) for each in (PATH, TABLE, TOPICS, PATTERN))
        return " ".join([self.kind, *(each for each in what if each)])

    @cached_property
    def topics(self) -> frozenset[str]:
        """Those that it names or, by a pattern, read when the query started."""
        named = self.identity.get(TOPICS, "").split(",")
        found = (name.removeprefix(TOPIC_ID) for name in self.identity if name.startswith(TOPIC_ID))
        return frozenset({*named, *found} - {""})

    def as_record(self) -> dict[str, Any]:
        known = {name: text for name, text in (("name", self.name), ("side", self.side)) if text is not None}
        repeated = {"offset_names": list(self.offset_names)} if self.offset_names else {}
        return {"kind": self.kind, **known, "identity": dict(self.identity), "options": dict(self.options), **repeated}


_IDENTITIES = TypeAdapter(tuple[SourceIdentity, ...])


def identities_of_record(record: object) -> tuple[SourceIdentity, ...] | None:
    try:
        return _IDENTITIES.validate_python(record) or None
    except ValidationError:
        return None


def keyed(sources: Sequence[SourceIdentity]) -> dict[str, SourceIdentity]:
    """Return sources by the names of their logs: their own name, else their position."""
    return {source.name or str(index): source for index, source in enumerate(sources)}


def source_identities(writer: DataStreamWriter) -> tuple[SourceIdentity, ...] | None:
    """Describe the sources, in the order of the offset log; None over Spark Connect.

    Raises OptionError if a file source is read twice through one DataFrame.
    """
    from py4j.protocol import Py4JError

    try:
        leaves = leaves_of(writer)
        _refuse_repeated_files(writer, leaves)
        own = [leaf for leaf in leaves if not leaf.is_again]
        sides = _sides(writer, [leaf.node for leaf in own])
        return (
            tuple(
                replace(
                    _identity(writer, leaf.node),
                    side=sides.get(at),
                    offset_names=_offset_names(leaf, leaves) if len(own) < len(leaves) else (),
                )
                for at, leaf in enumerate(own)
            )
            or None
        )
    except Py4JError:
        return None


class Leaf(NamedTuple):
    """A source of the logical plan.

    Attributes:
        name: Its name in an offset log with names: its own, else its position.
        position: In the offset log. A relation that is read again through the same DataFrame has a further one.
        log: Its log in the folder `sources`; equal relations share one.
        is_again: An earlier leaf is equal.
    """

    node: Any
    name: str
    position: int
    log: str
    is_again: bool


def leaves_of(writer: DataStreamWriter) -> list[Leaf]:
    found: list[Leaf] = []
    logs: list[Any] = []
    for position, node in enumerate(read_leaves(writer)):
        number = next((at for at, other in enumerate(logs) if node.equals(other)), len(logs))
        is_again = number < len(logs)
        logs += [] if is_again else [node]
        own = _name(node)
        found.append(Leaf(node, own or str(position), position, own or str(number), is_again))
    return found


def _offset_names(leaf: Leaf, leaves: Sequence[Leaf]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.name for each in leaves if each.log == leaf.log))


def sources_in_entry(writer: DataStreamWriter, offsets: Mapping[str, str | None]) -> list[tuple[Leaf, str, str | None]]:
    """Return each source with its name and offset in an entry of the offset log.

    From the fifth one on, Spark writes offsets with names in any order.
    """
    named = [(leaf, leaf.name if leaf.name in offsets else str(leaf.position)) for leaf in leaves_of(writer)]
    return [(leaf, name, offsets[name]) for leaf, name in named if name in offsets]


def _refuse_repeated_files(writer: DataStreamWriter, leaves: Sequence[Leaf]) -> None:
    for leaf in leaves:
        if not leaf.is_again:
            continue
        read, later = _identity(writer, leaf.node), leaves[leaf.position + 1 :]
        if read.kind == FILE or any(_identity(writer, each.node).kind == FILE for each in later):
            raise OptionError(
                f"The query reads {read.identity.get(PATH, read)} twice through one DataFrame, as a join or union with "
                "itself. Spark then writes two offsets and one log of the files that were read, and a lost log could "
                "not be distinguished from that. Nothing was started. Call spark.readStream once for each use, so that "
                "each DataFrame has its own log."
            )


def kind_of_offset(text: str | None) -> str | None:
    if log_offset(text) is not None:
        return FILE
    if delta_offset(text) is not None:
        return DELTA
    try:
        found = from_json(text or "")
    except ValueError:
        return None
    if not isinstance(found, dict) or not found:
        return None
    if iceberg_offset(text) is not None:
        return ICEBERG
    if found.keys() == {"offset", "timestamp"}:
        return "rate-micro-batch"
    return KAFKA if all(isinstance(each, dict) for each in found.values()) else None


def _sides(writer: DataStreamWriter, leaves: Sequence[Any]) -> dict[int, str]:
    found: dict[int, str] = {}

    def visit(node: Any, path: tuple[str, ...]) -> None:
        below = [child for child in items_of(node.children()) if child.isStreaming()]
        if not below and path:
            at = next((at for at, leaf in enumerate(leaves) if leaf.equals(node)), None)
            if at is not None:
                found.setdefault(at, "/".join(path))
        for child, side in zip(below, ("left", "right") if len(below) == 2 else ("",) * len(below), strict=True):
            joins = side and str(node.nodeName()) == "Join"
            visit(child, (*path, side) if joins else path)

    if len(leaves) > 1:
        visit(writer._df._jdf.queryExecution().analyzed(), ())
    return found


def source_options(leaf: Any) -> dict[str, str]:
    """Return the options by name in lower case; values may be secrets."""
    if str(leaf.getClass().getSimpleName()) == "StreamingRelation":
        return {str(name).lower(): str(text) for name, text in pairs_of(leaf.dataSource().options())}
    return {str(name).lower(): str(text) for name, text in dict(leaf.extraOptions()).items()}


def _identity(writer: DataStreamWriter, leaf: Any) -> SourceIdentity:
    is_v1 = str(leaf.getClass().getSimpleName()) == "StreamingRelation"
    options = source_options(leaf)
    folder = delta_folder(leaf)
    if folder is not None:
        kind, identity = DELTA, _delta(session_of(writer), folder)
    else:
        kind, identity = _v1(writer, leaf, options) if is_v1 else _v2(writer, leaf)
    deciding = {name: options[name] for name in _DECIDING.get(kind, ()) if name in options}
    differing = {name: text for name, text in deciding.items() if text.lower() != _DEFAULTS.get(name)}
    return SourceIdentity(kind, _name(leaf), identity, differing)


def _v1(writer: DataStreamWriter, leaf: Any, options: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    name = str(leaf.dataSource().className())
    if str(leaf.sourceName()).startswith("FileSource[") and "path" in options:
        return FILE, {PATH: _qualified(session_of(writer), options["path"]), "format": name.lower()}
    return name.lower(), {}


def _v2(writer: DataStreamWriter, leaf: Any) -> tuple[str, dict[str, str]]:
    found = iceberg_table(leaf)
    if found is not None:
        return ICEBERG, {
            TABLE: str(found.name()),
            **_known(TABLE_ID, lambda: str(found.operations().current().uuid())),
        }
    source = kafka_source(leaf)
    if source is not None:
        read = topics_of(writer, source)
        compacted = sorted(topic for topic, policy in read.policies.items() if policy.is_compacted)
        retained = {topic: policy.retention_ms for topic, policy in sorted(read.policies.items())}
        return KAFKA, {
            **({TOPICS: ",".join(sorted(read.topics))} if read.topics else {}),
            **({PATTERN: read.pattern} if read.pattern else {}),
            **({CLUSTER: read.cluster_id} if read.cluster_id else {}),
            **{f"{TOPIC_ID}{topic}": text for topic, text in sorted(read.topic_ids.items())},
            **({COMPACTED: ",".join(compacted)} if compacted else {}),
            **{f"{RETENTION_MS}{topic}": str(each) for topic, each in retained.items() if each is not None},
        }
    if not leaf.source().isDefined():
        return "table", {TABLE: str(leaf.table().name())}
    return str(leaf.sourceName()).lower(), {}


def _delta(session: SparkSession, folder: str) -> dict[str, str]:
    def table_id() -> str:
        jvm: Any = session._jvm
        found = jvm.io.delta.tables.DeltaTable.forPath(session._jsparkSession, folder).detail().select("id", [])
        return str(found.first().getString(0))

    return {PATH: _qualified(session, folder), **_known(TABLE_ID, table_id)}


def _name(leaf: Any) -> str | None:
    from py4j.protocol import Py4JError

    try:
        given = leaf.sourceIdentifyingName()
    except Py4JError:
        # Spark before 4.2 has no names.
        return None
    return str(given.name()) if str(given.getClass().getSimpleName()) == "UserProvided" else None


def _qualified(session: SparkSession, path: str) -> str:
    """Return a path as Spark compares it: absolute, with its scheme (`s3://` and `s3a://` differ)."""
    jvm: Any = session._jvm
    place = jvm.org.apache.hadoop.fs.Path(path)
    found = _known(
        PATH,
        lambda: str(
            place.getFileSystem(session._jsparkSession.sessionState().newHadoopConf()).makeQualified(place).toString()
        ),
    )
    return without_secrets(found.get(PATH, path))


def _known(name: str, find: Callable[[], str]) -> dict[str, str]:
    try:
        return {name: find()}
    except Exception:  # noqa: BLE001 - py4j raises whatever the JVM raises; unknown then
        return {}


@dataclass(frozen=True)
class SourceDistance:
    """The input that is read again from one source.

    Attributes:
        kind: "files", "Kafka records", "table versions", "rows", or "unknown" if its offsets are not counts.
    """

    source: str
    kind: str
    count: int | None

    @property
    def rows(self) -> int | None:
        return self.count if self.kind in ("Kafka records", "rows") else None


@dataclass(frozen=True)
class Distance:
    """The input between two batches; `span_ms` is between their plans, `earlier_at_ms` since the epoch (0: unknown)."""

    sources: tuple[SourceDistance, ...]
    span_ms: int
    earlier_at_ms: int = 0


def distance(live: LiveDirectory, earlier: bytes | None, from_batch: int, to_batch: int) -> Distance | None:
    """Return the input between two batches; None if an entry is missing or unreadable.

    `earlier` is the older entry from a snapshot; None reads that of the directory.
    """
    unreadable = f"{live.url} does not record what is between batch {to_batch} and batch {from_batch}"
    try:
        with reading(lambda why: LiveDirectoryError(f"{unreadable}: {why}.")):
            return _distance(live, earlier, from_batch, to_batch)
    except (FileNotFoundError, LiveDirectoryError):
        return None


def _distance(live: LiveDirectory, earlier: bytes | None, from_batch: int, to_batch: int) -> Distance:
    data = live.folder.read(f"{OFFSETS}/{to_batch}") if earlier is None else earlier
    newer = live.folder.read(f"{OFFSETS}/{from_batch}")
    before = parse_offset_entry(data, f"{OFFSETS}/{to_batch}")
    after = parse_offset_entry(newer, f"{OFFSETS}/{from_batch}")
    sources = [_between(live.folder, name, before.sources.get(name), offset) for name, offset in after.sources.items()]
    return Distance(tuple(sources), planned_at_ms(newer) - planned_at_ms(data), planned_at_ms(data))


def _between(folder: FileIO, source: str, before: str | None, after: str | None) -> SourceDistance:
    if after is None or after == before:
        return SourceDistance(source, "rows", 0)
    last = log_offset(after)
    if last is not None:
        first = log_offset(before)
        return SourceDistance(source, "files", _files(folder, source, -1 if first is None else first, last))
    records = _kafka_records(_json(before) if before else {}, _json(after)) if before else None
    if records is not None:
        return SourceDistance(source, "Kafka records", records)
    delta = delta_offset(after)
    if delta is not None:
        earlier = delta_offset(before)
        return SourceDistance(source, "table versions", delta.version - (earlier.version if earlier else 0))
    old, new = _json(before) if before else {"offset": 0}, _json(after)
    if isinstance(old, dict) and isinstance(new, dict) and new.keys() == {"offset", "timestamp"}:
        # RatePerMicroBatchStreamOffset counts rows.
        return SourceDistance(source, "rows", int(new["offset"]) - int(old["offset"]))
    return SourceDistance(source, "unknown", None)


def _files(folder: FileIO, source: str, first: int, last: int) -> int:
    return sum(1 for each in files_after(folder, source, first) if each.position <= last)


def _kafka_records(before: Any, after: Any) -> int | None:
    total = 0
    try:
        for topic, partitions in after.items():
            for partition, offset in partitions.items():
                total += int(offset) - int(before.get(topic, {}).get(partition, 0))
    except (AttributeError, TypeError, ValueError):
        return None
    return total


def planned_at_ms(data: bytes) -> int:
    line = data.decode("utf-8", "replace").split("\n")[1]
    metadata = from_json(line) if line.strip() else {}
    return int(metadata.get("batchTimestampMs") or 0)


def _json(text: str) -> Any:
    try:
        return from_json(text)
    except ValueError:
        return None
