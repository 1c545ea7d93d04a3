"""Parse Spark's query metadata and the entries of its offset and commit logs.

Formats: `StreamMetadata`, `OffsetSeqLog` (v1, v2) and `CommitLog` (v1, v2, v3) of Spark 3.5 to 4.3. An entry is one
file, named by its batch: a line with the version, then JSON lines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from dagster_ckpt.config.state_backend import PROVIDER_CLASS
from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, METADATA, OFFSETS
from dagster_ckpt.spark.versions import NAMES_SOURCES, SparkFile
from dagster_ckpt.values.safe_parsing import LARGEST_LONG, from_json, number_in, reading

# Set by an offline repartition; else shuffle partitions count.
INTERNAL_PARTITIONS = "spark.sql.streaming.internal.stateStore.partitions"
SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"
STATE_FORMAT = "spark.sql.streaming.stateStore.checkpointFormatVersion"
JOIN_FORMAT = "spark.sql.streaming.join.stateFormatVersion"
COMPRESSION_CODEC = "spark.sql.streaming.stateStore.compression.codec"
DEFAULT_CODEC = "lz4"
ROW_CHECKSUM = "spark.sql.streaming.stateStore.rowChecksum.enabled"
NO_OFFSET = "-"
# Fields of `QueryMetadata`; Spark reads only the id.
REWRITE_ID = "dagsterCkptRewriteId"
EDITS = "dagsterCkptEdits"
PLAN = "dagsterCkptPlan"
# A file with more is damaged and would exhaust the memory.
_MOST_PARTITIONS = 1_000_000
_Long = Annotated[int, Field(ge=-LARGEST_LONG, le=LARGEST_LONG)]
# It is part of file names.
_UniqueId = Annotated[str, Field(pattern=r"^[\w-]+$")]

_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(frozen=True)
class OffsetEntry:
    """The plan of a batch: one entry of the offset log.

    Attributes:
        conf: Settings that Spark pins for the life of the query.
        sources: Source name (v1: index) to its offset as JSON text; None before its first data.
        continuous: Continuous processing wrote it, without watermark and settings.
    """

    batch_id: int
    watermark_ms: int
    conf: Mapping[str, str]
    sources: Mapping[str, str | None]
    format_version: int = 1
    continuous: bool = False

    @property
    def partitions(self) -> int | None:
        return partitions_in(self.conf)

    @property
    def provider_class(self) -> str | None:
        return self.conf.get(PROVIDER_CLASS)


@dataclass(frozen=True)
class CommitEntry:
    """One entry of the commit log.

    Attributes:
        state_ids: Unique ids by operator, partition and store in checkpoint format v2; None in v1.
    """

    batch_id: int
    next_watermark_ms: int
    state_ids: Mapping[int, tuple[tuple[str, ...], ...]] | None
    format_version: int = 1
    sinks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def partitions_in(settings: Mapping[str, str]) -> int | None:
    number = settings.get(INTERNAL_PARTITIONS) or settings.get(SHUFFLE_PARTITIONS)
    return int(number) if number else None


_WATERMARK = "batchWatermarkMs"


class QueryMetadata(BaseModel):
    """Spark's `metadata` with the fields of this package.

    Attributes:
        rewrite_id: None if the query wrote all of the state.
        plan: That of the query for which this rewrite migrated the state.
    """

    id: str = Field(min_length=1)
    rewrite_id: str | None = Field(default=None, alias=REWRITE_ID)
    edits: tuple[str, ...] = Field(default=(), alias=EDITS)
    plan: dict[str, Any] | None = Field(default=None, alias=PLAN)


class _OffsetMetadata(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    watermark_ms: _Long = Field(default=0, alias=_WATERMARK)
    conf: dict[str, str] = {}


class _CommitMetadata(BaseModel):
    next_watermark_ms: _Long = Field(default=0, alias="nextBatchWatermarkMs")
    state_ids: dict[_Long, tuple[tuple[_UniqueId, ...], ...]] | None = Field(default=None, alias="stateUniqueIds")
    sinks: dict[str, dict[str, Any]] | None = Field(default=None, alias="sinkMetadataMap")


def read_metadata(folder: FileIO) -> QueryMetadata:
    return parse_metadata(folder.read(METADATA), f"{folder.url}/{METADATA}")


def read_offset_entry(folder: FileIO, batch_id: int) -> OffsetEntry:
    path = f"{OFFSETS}/{batch_id}"
    return parse_offset_entry(folder.read(path), f"{folder.url}/{path}")


def read_commit_entry(folder: FileIO, batch_id: int) -> CommitEntry:
    path = f"{COMMITS}/{batch_id}"
    return parse_commit_entry(folder.read(path), f"{folder.url}/{path}")


def parse_metadata(data: bytes, where: str) -> QueryMetadata:
    return _model(QueryMetadata, data.decode("utf-8", "replace"), where)


def query_metadata(
    query_id: str,
    rewrite_id: str | None = None,
    edits: Sequence[str] = (),
    plan: Mapping[str, Any] | None = None,
) -> bytes:
    fields: dict[str, object] = {"id": query_id}
    fields |= {REWRITE_ID: rewrite_id} if rewrite_id is not None else {}
    fields |= {EDITS: list(edits)} if edits else {}
    fields |= {PLAN: dict(plan)} if plan is not None else {}
    return json.dumps(fields, separators=(",", ":")).encode()


def with_query_id(data: bytes, where: str, query_id: str) -> bytes:
    before = parse_metadata(data, where)
    return query_metadata(query_id, before.rewrite_id, before.edits, before.plan)


def parse_offset_entry(data: bytes, where: str) -> OffsetEntry:
    version, lines = _lines(data, where, SparkFile.OFFSETS)
    if not lines:
        raise _malformed(where, "it ends after its version line")
    continuous = not lines[0].strip()
    metadata = _OffsetMetadata() if continuous else _model(_OffsetMetadata, lines[0], where)
    offsets = _offsets(version, lines, where)
    for name, offset in offsets:
        if offset.startswith("{") and not offset.rstrip().endswith("}"):
            raise _malformed(where, f"the offset of source {name} ends early")
    sources = {name: None if offset == NO_OFFSET else offset for name, offset in offsets}
    entry = OffsetEntry(_batch_id(where), metadata.watermark_ms, metadata.conf, sources, version, continuous)
    with reading(lambda why: _malformed(where, why)):
        if not 0 < (entry.partitions or 1) <= _MOST_PARTITIONS:
            raise ValueError(f"it names {entry.partitions} state partitions")
    return entry


def plan_digest(data: bytes, where: str) -> str:
    entry = parse_offset_entry(data, where)
    _, metadata, *offsets = data.decode().split("\n")
    times = [] if entry.continuous else [from_json(metadata).get(name) for name in ("batchTimestampMs", _WATERMARK)]
    return hashlib.sha256(json.dumps([times, [each for each in offsets if each]]).encode()).hexdigest()[:16]


def with_offsets(data: bytes, where: str, changed: Mapping[str, object]) -> bytes:
    version, lines = _lines(data, where, SparkFile.OFFSETS)
    first = data.split(b"\n", 1)[0].decode()
    for index, (name, _) in enumerate(_offsets(version, lines, where), 1):
        if name in changed:
            offset = json.dumps(changed[name], separators=(",", ":"))
            lines[index] = offset if version == 1 else f"{name}:{offset}"
    return "\n".join([first, *lines]).encode()


def with_sources(data: bytes, where: str, sources: Mapping[str, str | None]) -> bytes:
    if not all(name.isdecimal() for name in sources) and NAMES_SOURCES in parse_offset_entry(data, where).conf:
        # Spark pins this setting, and would otherwise continue with numbers.
        data = with_settings(data, where, {NAMES_SOURCES: "true"})
    version, lines = _lines(data, where, SparkFile.OFFSETS)
    is_named = version != 1 or not all(name.isdecimal() for name in sources)
    offsets = {name: NO_OFFSET if offset is None else offset for name, offset in sources.items()}
    found = [f"{name}:{offset}" if is_named else offset for name, offset in offsets.items()]
    return "\n".join([f"v{2 if is_named else version}", lines[0], *found]).encode()


def only_offset(data: bytes, where: str, source: str, name: str) -> bytes:
    """Return the entry of a query that reads one source alone, under `name`."""
    version, lines = _lines(data, where, SparkFile.OFFSETS)
    offset = dict(_offsets(version, lines, where)).get(source, NO_OFFSET)
    return "\n".join([f"v{version}", lines[0], offset if version == 1 else f"{name}:{offset}"]).encode()


def parse_commit_entry(data: bytes, where: str) -> CommitEntry:
    version, lines = _lines(data, where, SparkFile.COMMITS)
    text = lines[0] if lines else ""
    if not text.strip() and version != 1:
        raise _malformed(where, "it ends after its version line")
    metadata = _model(_CommitMetadata, text or "{}", where)
    return CommitEntry(_batch_id(where), metadata.next_watermark_ms, metadata.state_ids, version, metadata.sinks or {})


def plan_without_data(folder: FileIO, batch_id: int, *, now_ms: int) -> bytes:
    """Plan a batch without input, which only moves the watermark; its `current_timestamp()` is `now_ms`."""
    where = f"{folder.url}/{OFFSETS}/{batch_id}"
    data = folder.read(f"{OFFSETS}/{batch_id}")
    entry, commit = parse_offset_entry(data, where), read_commit_entry(folder, batch_id)
    if entry.continuous:
        raise LiveDirectoryError(
            f"{where} was written by continuous processing, whose epochs cannot be planned here. Adopt the "
            "directory without in_place: the query then continues in a copy."
        )
    version, metadata, *sources = data.decode().split("\n")
    planned = from_json(metadata)
    planned[_WATERMARK] = max(entry.watermark_ms, commit.next_watermark_ms)
    planned["batchTimestampMs"] = now_ms
    return "\n".join([version, json.dumps(planned, separators=(",", ":")), *sources]).encode()


def with_watermark(data: bytes, where: str, watermark_ms: int) -> bytes:
    version, lines = _lines(data, where, SparkFile.OFFSETS)
    with reading(lambda why: _malformed(where, why)):
        metadata = {**from_json(lines[0]), _WATERMARK: watermark_ms}
    return "\n".join([f"v{version}", json.dumps(metadata, separators=(",", ":")), *lines[1:]]).encode()


def with_settings(data: bytes, where: str, settings: Mapping[str, str]) -> bytes:
    version, lines = _lines(data, where, SparkFile.OFFSETS)
    with reading(lambda why: _malformed(where, why)):
        metadata = from_json(lines[0])
        metadata["conf"] = {**metadata["conf"], **settings}
    return "\n".join([f"v{version}", json.dumps(metadata, separators=(",", ":")), *lines[1:]]).encode()


def with_state_ids(data: bytes, where: str, state_ids: Mapping[int, tuple[tuple[str, ...], ...]] | None) -> bytes:
    version, lines = _lines(data, where, SparkFile.COMMITS)
    with reading(lambda why: _malformed(where, why)):
        metadata = from_json(lines[0] if lines and lines[0].strip() else "{}")
        metadata.pop("stateUniqueIds", None)
    if state_ids is not None:
        metadata["stateUniqueIds"] = {str(operator): ids for operator, ids in state_ids.items()}
    # Version 3 (named sinks) fits either format.
    version = version if version > 2 else 1 if state_ids is None else 2
    return f"v{version}\n{json.dumps(metadata, separators=(',', ':'))}".encode()


def parse_log_lines(data: bytes, where: str) -> list[Mapping[str, object]]:
    _version, lines = _lines(data, where, SparkFile.FILE_LOG)
    with reading(lambda why: _malformed(where, f"a line is not JSON ({why})")):
        objects = [from_json(line) for line in lines if line.strip()]
    if not all(isinstance(item, dict) for item in objects):
        raise _malformed(where, "a line is not a JSON object")
    return objects


def log_entry(lines: Iterable[object]) -> bytes:
    return "\n".join(["v1", *(json.dumps(line, separators=(",", ":")) for line in lines)]).encode()


def check_log_version(data: bytes, where: str) -> None:
    SparkFile.FILE_LOG.version_in(data.partition(b"\n")[0].decode("utf-8", "replace"), where)


def _offsets(version: int, lines: Sequence[str], where: str) -> list[tuple[str, str]]:
    if version == 1:
        return [(str(index), line) for index, line in enumerate(lines[1:])]
    return [_named_offset(line, where) for line in lines[1:]]


def _named_offset(line: str, where: str) -> tuple[str, str]:
    name, colon, offset = line.partition(":")
    if not colon:
        raise _malformed(where, f"the line {line[:80]!r} has no source name before its offset")
    return name, offset


def _lines(data: bytes, where: str, kind: SparkFile) -> tuple[int, list[str]]:
    if not data:
        raise _malformed(where, "it is empty")
    # Spark refuses other bytes, too.
    with reading(lambda why: _malformed(where, why)):
        line, *rest = data.decode().split("\n")
    version = kind.version_in(line, where)
    if version is None:
        raise _malformed(where, f"its first line is {line[:40]!r}, but must be a version such as v1")
    while rest and not rest[-1] and len(rest) > 1:
        rest.pop()
    return version, rest


def _model(model: type[_Model], text: str, where: str) -> _Model:
    with reading(lambda why: _malformed(where, why)):
        return model.model_validate_json(text)


def _batch_id(where: str) -> int:
    number = number_in(where.rsplit("/", 1)[-1])
    if number is None:
        raise _malformed(where, "its name is not a batch number")
    return number


def _malformed(where: str, why: str) -> LiveDirectoryError:
    return LiveDirectoryError(
        f"{where} cannot be read: {why}. Spark could not resume from it either. "
        "Restore the newest checkpoint or savepoint, or repair the file."
    )
