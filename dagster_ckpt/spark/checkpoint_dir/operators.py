"""Read Spark's metadata of stateful operators: their stores, partitions and schemas; widen schemas of Spark 3.5.

Formats: `OperatorStateMetadataV1`/`V2` and `StateSchemaCompatibilityChecker` of Spark 4. Spark 3.5 writes only schemas,
by which its operators are found.

Only a `KnownQuery` can prove that a query keeps no state: in a directory, a lost folder `state` looks the same.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, Field

from dagster_ckpt.errors import IncompleteCutError, LiveDirectoryError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import StillMine
from dagster_ckpt.spark.checkpoint_dir.layout import (
    DEFAULT_STORE,
    STATE,
    NeededFile,
    batch_ids,
    read_needed,
    store_directory,
)
from dagster_ckpt.spark.checkpoint_dir.logs import OffsetEntry, read_offset_entry
from dagster_ckpt.spark.query.plan import PlanDescription, read_plan
from dagster_ckpt.spark.versions import PINNED_SINCE_OPERATOR_METADATA, SparkFile
from dagster_ckpt.values.safe_parsing import from_json, reading

_SCHEMAS = "_stateSchema"
JOIN = "symmetricHashJoin"
LIMIT = "globalLimit"
# Without metadata, an operator has one store or is a join with these four.
_JOIN_STORES = ("left-keyToNumValues", "left-keyWithIndexToValue", "right-keyToNumValues", "right-keyWithIndexToValue")
UNNAMED = "unnamed"
_MAY_BE_NULL = ("nullable", "containsNull", "valueContainsNull")
# In characters, each of up to three bytes.
_MOST_IN_A_CHUNK = 65535 // 3


@dataclass(frozen=True)
class Operator:
    """A stateful operator.

    Attributes:
        name: Spark's name, such as `stateStoreSave`; `unnamed` without metadata.
        metadata_version: 0 if Spark 3.5 wrote the directory.
    """

    number: int
    name: str
    stores: tuple[str, ...]
    single_partition: bool
    files: tuple[NeededFile, ...]
    metadata_version: int
    schema_version: int


class _Store(BaseModel):
    name: str = Field(alias="storeName")
    schema_paths: list[str] = Field(default=[], alias="stateSchemaFilePaths")


class _Info(BaseModel):
    name: str = Field(alias="operatorName")


class _Metadata(BaseModel):
    info: _Info = Field(alias="operatorInfo")
    stores: list[_Store] = Field(alias="stateStoreInfo", min_length=1)


def read_operators(folder: FileIO, batch_id: int) -> list[Operator]:
    """Read operators, without metadata of later batches."""
    numbers = batch_ids(folder, STATE)
    for expected, number in enumerate(numbers):
        if expected != number:
            raise _incomplete(folder, f"{STATE}/{expected}", f"operator {number} has state, but this one has none")
    return [_read_operator(folder, number, batch_id) for number in numbers]


def rewrite_schema_paths(data: bytes, old_path: str, location: str, *, partitions: int | None = None) -> bytes:
    """Replace the absolute paths, which would lead a restored query to the original directory.

    Only metadata v2 has them (transformWithState, join state v3 and later). `partitions` replaces their number too.
    """
    version, _, text = data.decode("utf-8", "replace").partition("\n")
    with reading(lambda why: LiveDirectoryError(f"{old_path} is not operator metadata that Spark wrote: {why}.")):
        metadata: dict[str, Any] = from_json(text)
        for store in metadata["stateStoreInfo"]:
            if partitions is not None:
                store["numPartitions"] = partitions
            if "stateSchemaFilePaths" in store:
                paths = [_below_state(path, old_path) for path in store["stateSchemaFilePaths"]]
                store["stateSchemaFilePaths"] = [f"{location}/{path}" for path in paths]
    return f"{version}\n{json.dumps(metadata, separators=(',', ':'))}".encode()


def is_operator_metadata(path: str) -> bool:
    return is_metadata_v2(path) or (path.startswith(f"{STATE}/") and path.endswith("/_metadata/metadata"))


def is_metadata_v2(path: str) -> bool:
    if "/_metadata/" not in path:
        return False
    parts = path.split("/")
    return len(parts) == 5 and parts[0] == STATE and parts[2:4] == ["_metadata", "v2"]


def _read_operator(folder: FileIO, number: int, batch_id: int) -> Operator:
    root = f"{STATE}/{number}"
    v2 = f"{root}/_metadata/v2"
    batches = [batch for batch in batch_ids(folder, v2) if batch <= batch_id]
    if batches:
        return _with_schema_files(folder, number, [f"{v2}/{batch}" for batch in batches])
    path = f"{root}/_metadata/metadata"
    try:
        file = read_needed(folder, path)
    except FileNotFoundError as error:
        if _must_have_metadata(folder, batch_id):
            raise _incomplete(folder, path, "it names the operator's state stores") from error
        return _without_metadata(folder, number)
    metadata = _parse(file)
    stores = tuple(store.name for store in metadata.stores)
    schemas = [_schema(folder, f"{store_directory(number, 0, store)}/_metadata/schema") for store in stores]
    version = max(_schema_version(schema) for schema in schemas)
    single = metadata.info.name == LIMIT or not _key_types(schemas[0])
    return Operator(number, metadata.info.name, stores, single, (file, *schemas), 1, version)


def _must_have_metadata(folder: FileIO, batch_id: int) -> bool:
    try:
        return PINNED_SINCE_OPERATOR_METADATA in read_offset_entry(folder, batch_id).conf
    except FileNotFoundError:
        return True


def _without_metadata(folder: FileIO, number: int) -> Operator:
    names = folder.listing(f"{STATE}/{number}/0").names
    is_join = any(store in names for store in _JOIN_STORES)
    stores = _JOIN_STORES if is_join else (DEFAULT_STORE,)
    schemas = [_schema(folder, f"{store_directory(number, 0, store)}/_metadata/schema") for store in stores]
    version = max(_schema_version(schema) for schema in schemas)
    types = _key_types(schemas[0])
    # A limit has one counter under a null key.
    name = JOIN if is_join else LIMIT if types == ["void"] else UNNAMED
    return Operator(number, name, stores, name == LIMIT or not types, tuple(schemas), 0, version)


def _with_schema_files(folder: FileIO, number: int, paths: list[str]) -> Operator:
    files = {path: read_needed(folder, path) for path in paths}
    newest = _parse(files[paths[-1]])
    version = 1
    for path in paths:
        for store in _parse(files[path]).stores:
            for schema in (_below_state(absolute, path) for absolute in store.schema_paths):
                try:
                    files.setdefault(schema, read_needed(folder, schema))
                except FileNotFoundError as error:
                    # Spark purges schemas before their metadata.
                    if path == paths[-1]:
                        raise _incomplete(folder, schema, f"{path} refers to it") from error
                else:
                    version = max(version, _schema_version(files[schema]))
    stores = tuple(store.name for store in newest.stores)
    return Operator(number, newest.info.name, stores, False, tuple(files.values()), 2, version)


def _schema(folder: FileIO, path: str) -> NeededFile:
    try:
        return read_needed(folder, path)
    except FileNotFoundError as error:
        raise _incomplete(folder, path, "Spark checks a restarted query against it") from error


def _parse(file: NeededFile) -> _Metadata:
    line, _, text = (file.data or b"").decode("utf-8", "replace").partition("\n")
    SparkFile.OPERATOR_METADATA.version_in(line, f"{file.folder.url}/{file.source}")
    with reading(
        lambda why: LiveDirectoryError(
            f"{file.folder.url}/{file.source} is not readable operator metadata: {why}. Restore a snapshot, or remove "
            "the file: Spark writes it again when the query starts."
        )
    ):
        return _Metadata.model_validate_json(text)


def _schema_version(schema: NeededFile) -> int:
    where = f"{schema.folder.url}/{schema.source}"
    try:
        line, _ = _utf(schema.data or b"", 0)
    except struct.error as error:
        raise _no_schema(schema, error) from error
    version = SparkFile.STATE_SCHEMA.version_in(line, where)
    if version is None:
        raise _no_schema(schema, f"it begins with {line[:40]!r} and not with a version")
    return version


def _key_types(schema: NeededFile) -> list[object]:
    """State without key columns has one partition (`StatefulOperatorPartitioning`)."""
    return [column.get("type") for column in key_columns(schema)]


def key_columns(schema: NeededFile) -> list[dict[str, Any]]:
    return _columns(schema, 1)


def value_columns(schema: NeededFile) -> list[dict[str, Any]]:
    return _columns(schema, 2)


def _columns(schema: NeededFile, part: int) -> list[dict[str, Any]]:
    with reading(lambda why: _no_schema(schema, why)):
        (text,) = itertools.islice(_schema_texts(schema.data or b""), part, part + 1)
        fields: list[dict[str, Any]] = from_json(text)["fields"]
        return fields


def _schema_texts(data: bytes) -> Iterator[str]:
    version, at = _utf(data, 0)
    yield version
    for _ in ("key", "value"):
        chunks, text = 1, ""
        if version != "v1":
            (chunks,) = struct.unpack_from(">i", data, at)
            at += 4
        for _ in range(chunks):
            chunk, at = _utf(data, at)
            text += chunk
        yield text


def _no_schema(schema: NeededFile, why: object) -> LiveDirectoryError:
    return LiveDirectoryError(
        f"{schema.folder.url}/{schema.source} is not a readable state schema: {why}. Restore a snapshot, or remove "
        "the file: Spark writes it again when the query starts."
    )


def widen_schemas(folder: FileIO, batch_id: int, still_mine: StillMine) -> list[str]:
    """Let state schemas of Spark 3.5 allow nulls, so that any Spark continues; return the changed paths.

    Spark refuses state if a column may be null in the query but not in the stored schema. Spark 3.5 infers from a
    join's condition that columns are never null, except in a batch in which one side has no rows: a start that begins
    with such a batch fails. Rows are stored alike, and Spark 4.3 stores only nullable schemas.
    """
    changed = []
    for operator in read_operators(folder, batch_id):
        for schema in operator.files if operator.metadata_version == 0 else ():
            data = _widened(schema)
            if data == schema.data:
                continue
            head, _, name = schema.source.rpartition("/")
            with still_mine():
                # Hadoop's checksum is that of the old content.
                folder.delete(f"{head}/.{name}.crc")
                folder.write(schema.source, [data])
            changed.append(schema.source)
    return changed


def check_schemas(folder: FileIO, batch_id: int) -> None:
    for operator in read_operators(folder, batch_id):
        for schema in operator.files if operator.metadata_version == 0 else ():
            _widened(schema)


def _widened(schema: NeededFile) -> bytes:
    with reading(lambda why: _no_schema(schema, why)):
        version, *texts = _schema_texts(schema.data or b"")
        parts = [_as_utf(version)]
        for text in texts:
            found = from_json(text)
            _check_type(found)
            nullable = _nullable(found)
            wide = text if nullable == found else json.dumps(nullable, separators=(",", ":"))
            pieces = [wide[start : start + _MOST_IN_A_CHUNK] for start in range(0, len(wide), _MOST_IN_A_CHUNK)]
            if version == "v1":
                pieces = [wide]
            else:
                parts.append(struct.pack(">i", len(pieces)))
            parts += map(_as_utf, pieces)
        return b"".join(parts)


_PARTS: Mapping[str, Mapping[str, type]] = {
    "struct": {"fields": list},
    "array": {"elementType": object, "containsNull": bool},
    "map": {"keyType": object, "valueType": object, "valueContainsNull": bool},
}
_COLUMN = {"name": str, "type": object, "nullable": bool}


def _check_type(found: Any) -> None:
    if isinstance(found, str):
        return
    kind = found["type"]
    if kind == "udt":
        return
    _check_parts(found, _PARTS[kind])
    for column in found.get("fields", ()):
        _check_parts(column, _COLUMN)
        _check_type(column["type"])
    for part in ("elementType", "keyType", "valueType"):
        if part in found:
            _check_type(found[part])


def _check_parts(found: Any, parts: Mapping[str, type]) -> None:
    for name, kind in parts.items():
        if not isinstance(found[name], kind):
            raise TypeError(f"{name} is {found[name]!r}")


def _nullable(part: Any) -> Any:
    if isinstance(part, list):
        return [_nullable(each) for each in part]
    if not isinstance(part, dict):
        return part
    return {
        name: True if name in _MAY_BE_NULL else value if name == "metadata" else _nullable(value)
        for name, value in part.items()
    }


def _as_utf(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">H", len(data)) + data


def _utf(data: bytes, at: int) -> tuple[str, int]:
    # Java's DataOutput.writeUTF.
    (length,) = struct.unpack_from(">H", data, at)
    return data[at + 2 : at + 2 + length].decode("utf-8", "replace"), at + 2 + length


def _below_state(path: str, where: str) -> str:
    head, marker, tail = path.rpartition(f"/{_SCHEMAS}/")
    parts = head.rsplit(f"/{STATE}/", 1)
    if not marker or len(parts) != 2 or ".." in path.split("/"):
        raise LiveDirectoryError(
            f"{where} refers to the state schema {path!r}, which is not inside a live directory "
            f"({STATE}/<operator>/{_SCHEMAS}/...). The file is damaged: restore a snapshot."
        )
    return f"{STATE}/{parts[1]}{marker}{tail}"


def _incomplete(folder: FileIO, path: str, why: str) -> IncompleteCutError:
    return IncompleteCutError(
        f"{folder.url}/{path} is missing: {why}. The live directory is not intact; restore a snapshot, or run the "
        "query once more if Spark still starts it."
    )


class ExecutionMode(StrEnum):
    """How Spark executes a query; triggers that only time micro-batches are all MICRO_BATCH.

    ASYNC_PROGRESS writes offsets and commits periodically in the background. CONTINUOUS has long-running tasks with
    epochs. The offsets of a REAL_TIME batch are known only at its end.
    """

    MICRO_BATCH = "MICRO_BATCH"
    ASYNC_PROGRESS = "ASYNC_PROGRESS"
    CONTINUOUS = "CONTINUOUS"
    REAL_TIME = "REAL_TIME"


def mode_in_logs(committed: OffsetEntry, before: OffsetEntry | None) -> ExecutionMode:
    """Infer the mode. Real-time mode, and asynchronous tracking without a gap, look like micro-batches.

    Only the running query reports them (`SupervisedQuery.facts`).
    """
    if committed.continuous:
        return ExecutionMode.CONTINUOUS
    if before is not None and before.batch_id < committed.batch_id - 1:
        return ExecutionMode.ASYNC_PROGRESS
    return ExecutionMode.MICRO_BATCH


def mode_of_execution(execution_class: str, trigger_class: str) -> ExecutionMode:
    if trigger_class == "RealTimeTrigger":
        return ExecutionMode.REAL_TIME
    if execution_class == "ContinuousExecution":
        return ExecutionMode.CONTINUOUS
    if execution_class == "AsyncProgressTrackingMicroBatchExecution":
        return ExecutionMode.ASYNC_PROGRESS
    return ExecutionMode.MICRO_BATCH


# A watermark keeps no state, and Spark removes some limits.
_MAY_KEEP_NONE = {"EventTimeWatermark", "GlobalLimit"}


@dataclass(frozen=True)
class KnownQuery:
    """What catalog and newest snapshot know of a query: its least number of operators with state, and its last mode."""

    operators: int = 0
    mode: ExecutionMode | None = None

    @staticmethod
    def of(plan: object, properties: Mapping[str, Any] | None = None) -> KnownQuery:
        noted = properties or {}
        is_same = not plan or not noted.get("plan") or noted["plan"] == plan
        listed = noted.get("state_operators")
        counted = len(listed) if is_same and isinstance(listed, list) else 0
        described = read_plan(plan) if plan else None
        mode = noted.get("mode")
        known_mode = ExecutionMode(mode) if mode in list(ExecutionMode) else None
        return KnownQuery(max(counted, int(described is not None and keeps_state(described))), known_mode)

    def is_asynchronous(self, offsets: Sequence[int], commits: Sequence[int]) -> bool:
        """Whether the logs certainly have gaps from asynchronous progress tracking."""
        between = range(min(commits, default=0), max(commits, default=0))
        return self.mode is ExecutionMode.ASYNC_PROGRESS or bool({*between} - {*offsets} - {*commits})

    def check_operators(self, folder: FileIO, found: Collection[int], committed: Collection[int]) -> None:
        missing = sorted({*range(self.operators), *committed} - {*found})
        if missing:
            why = "the newest commit names it" if missing[0] in committed else "its query is known to keep state there"
        elif not found and STATE in folder.list():
            missing, why = [0], f"{STATE} is empty, and Spark creates this folder only for a query that keeps state"
        if missing:
            raise IncompleteCutError(
                f"{folder.url}/{STATE}/{missing[0]} is missing: {why}. The live directory is damaged: restore a "
                "snapshot."
            )


NOTHING_KNOWN = KnownQuery()


def keeps_state(plan: PlanDescription) -> bool:
    return any(operator.kind not in _MAY_KEEP_NONE for operator in plan.operators)
