"""The state of a stopped query: its rows as bytes, and the directory that a rewrite of it fills.

Spark fixes the shape of a state (provider, partitions, checkpoint format) at the first batch of a query.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_ckpt.config.state_backend import PROVIDER_CLASS
from dagster_ckpt.errors import RestoreError, StateRewriteError
from dagster_ckpt.io.file_io import no_op
from dagster_ckpt.spark.checkpoint_dir.cut import STATE_EDITS, Cut, cut
from dagster_ckpt.spark.checkpoint_dir.layout import (
    COMMITS,
    METADATA,
    NOT_IN_USE,
    OFFSETS,
    STATE,
    LiveDirectory,
    batch_ids,
)
from dagster_ckpt.spark.checkpoint_dir.logs import (
    COMPRESSION_CODEC,
    DEFAULT_CODEC,
    INTERNAL_PARTITIONS,
    JOIN_FORMAT,
    ROW_CHECKSUM,
    SHUFFLE_PARTITIONS,
    CommitEntry,
    OffsetEntry,
    query_metadata,
    read_commit_entry,
    read_offset_entry,
    with_settings,
    with_state_ids,
)
from dagster_ckpt.spark.checkpoint_dir.operators import (
    JOIN,
    LIMIT,
    UNNAMED,
    Operator,
    is_operator_metadata,
    key_columns,
    read_operators,
    rewrite_schema_paths,
)
from dagster_ckpt.spark.checkpoint_dir.restore import Watch, clone
from dagster_ckpt.spark.checkpoint_dir.rocksdb_zip_version import (
    OF_OTHER_RELEASES,
    give_snapshots_version,
    is_of_spark_4_0,
)
from dagster_ckpt.spark.checkpoint_dir.state_files import HEAP, ROCKSDB, CommittedState, state_files
from dagster_ckpt.state.heap import HEAP_CODEC, HeapStore
from dagster_ckpt.state.reading import session_like

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


MOST_PARTITIONS = 32_768
# Spark's names; LZF blocks cannot be read here.
READABLE_CODECS = ("lz4", "zstd", "snappy")
# Spark 4.3's reader of all column families knows several values only of transformWithState lists.
_NEWEST_OF_JOINS = 3
TRANSFORM = "transformWithState"
# Pinned since Spark 3.3, as false for older queries.
_STRICT = "spark.sql.streaming.statefulOperator.useStrictDistribution"
_NAMES = {HEAP: "heap state (HDFSBackedStateStoreProvider)", ROCKSDB: "RocksDB"}


@dataclass(frozen=True)
class StateShape:
    provider: str
    partitions: int
    checkpoint_format: int = 1

    def __str__(self) -> str:
        provider = _NAMES.get(self.provider, self.provider)
        return f"{self.partitions} partitions of {provider}, checkpoint format v{self.checkpoint_format}"


@dataclass(frozen=True)
class StoredState:
    shape: StateShape
    operators: tuple[str, ...]
    settings: Mapping[str, str]

    @staticmethod
    def of_properties(properties: Mapping[str, Any]) -> StoredState | None:
        operators = properties.get("state_operators") or ()
        provider, partitions = properties.get("state_store_provider"), properties.get("state_partitions")
        if not operators or not provider or not partitions:
            return None
        version = (properties.get("formats") or {}).get("state_checkpoint") or 1
        return StoredState(
            StateShape(str(provider), int(partitions), int(version)),
            tuple(str(operator["name"]) for operator in operators),
            properties.get("conf") or {},
        )


@dataclass(frozen=True)
class WantedShape:
    """How state is to be stored; None leaves that as it is."""

    partitions: int | None = None
    provider: str | None = None
    checkpoint_format: int | None = None

    def of(self, shape: StateShape) -> StateShape:
        wanted = {name: value for name, value in vars(self).items() if value is not None}
        changed = replace(shape, **wanted)
        # Only RocksDB has format v2.
        return replace(changed, checkpoint_format=1) if changed.provider == HEAP else changed


def check_rewrite(stored: StoredState, wanted: StateShape, *, changes_rows: bool = False) -> None:
    why = _why_not(stored, wanted, moves=changes_rows or wanted.partitions != stored.shape.partitions)
    if why is not None:
        raise StateRewriteError(
            f"The state ({stored.shape}) cannot be rewritten as {wanted}: {why} Nothing was changed. Keep the shape "
            "that the state has, or begin a new stream."
        )


def _why_not(stored: StoredState, wanted: StateShape, *, moves: bool) -> str | None:
    if not 0 < wanted.partitions <= MOST_PARTITIONS:
        return f"the number of state partitions must be from 1 to {MOST_PARTITIONS}."
    for shape in (stored.shape, wanted):
        if shape.provider not in _NAMES:
            return f"the files of {shape.provider} are not known, only those of Spark's own providers."
    if moves and stored.settings.get(_STRICT) != "true":
        # A conversion keeps each row in its partition.
        return (
            f"the query began on Spark 3.2 or older ({_STRICT} is not true), which may place a key by some of its "
            "columns, so the partition of a row is not known. Its backend and checkpoint format can be changed, "
            "not the number of its partitions or its rows."
        )
    if JOIN in stored.operators and int(stored.settings.get(JOIN_FORMAT, "2")) > _NEWEST_OF_JOINS:
        return (
            f"Spark's StateRewriter damages join state of format v{stored.settings[JOIN_FORMAT]}: it treats "
            "several values of a key as one."
        )
    if replace(stored.shape, partitions=wanted.partitions) != wanted and LIMIT in stored.operators:
        return "Spark cannot read the counter of a limit, so its state is only copied as it is."
    if HEAP in (stored.shape.provider, wanted.provider):
        return _why_not_on_the_heap(stored, wanted)
    return None


def _why_not_on_the_heap(stored: StoredState, wanted: StateShape) -> str | None:
    if stored.settings.get(ROW_CHECKSUM) == "true":
        return f"{ROW_CHECKSUM} is on, and heap state and RocksDB keep these checksums differently."
    codec = stored.settings.get(COMPRESSION_CODEC, DEFAULT_CODEC)
    if stored.shape.provider == HEAP and codec not in READABLE_CODECS:
        return f"it is compressed with {codec}, and only {', '.join(READABLE_CODECS)} can be read."
    if LIMIT in stored.operators and set(stored.operators) != {LIMIT}:
        return "Spark cannot read the counter of a limit, and heap state is rewritten by way of RocksDB."
    if wanted.provider != HEAP:
        return None
    for name in stored.operators:
        if name.startswith(TRANSFORM):
            return f"Spark keeps the state of {name} in RocksDB only."
        if name == JOIN and int(stored.settings.get(JOIN_FORMAT, "2")) > 2:
            return f"Spark keeps join state of format v{stored.settings[JOIN_FORMAT]} in RocksDB only."
    return None


StateIds = Mapping[int, tuple[tuple[str, ...], ...]]


@dataclass(frozen=True)
class StoppedState:
    live: LiveDirectory
    cut: Cut

    @staticmethod
    def read(live: LiveDirectory) -> StoppedState:
        return StoppedState(live, cut(live, carry_in_flight=True))

    @property
    def batch_id(self) -> int:
        return self.cut.batch_id

    @cached_property
    def operators(self) -> list[Operator]:
        return read_operators(self.live.folder, self.batch_id)

    @cached_property
    def offsets(self) -> OffsetEntry:
        return read_offset_entry(self.live.folder, self.batch_id)

    @cached_property
    def commit(self) -> CommitEntry:
        return read_commit_entry(self.live.folder, self.batch_id)

    @property
    def edits(self) -> tuple[str, ...]:
        return tuple(self.cut.properties.get(STATE_EDITS, ()))

    @cached_property
    def stored(self) -> StoredState | None:
        return StoredState.of_properties(self.cut.properties)


def refuse_existing(target: LiveDirectory) -> None:
    if target.exists():
        raise RestoreError(f"{target.url} exists already. A rewrite of state needs a new directory.")


def write_skeleton(
    source: StoppedState,
    target: LiveDirectory,
    shape: StateShape,
    rewrite_id: str,
    watch: Watch,
    *,
    is_edit: bool = False,
    left_out: Sequence[Operator] = (),
    state: StoppedState | None = None,
    plan: Mapping[str, Any] | None = None,
) -> None:
    """Create a directory that has everything of a stopped query but its state, marked as not in use throughout.

    Args:
        watch: Called for every file; if it raises, the directory is incomplete.
        is_edit: Other rows are written, which the directory remembers.
        left_out: Operators that Spark's rewriter must not see.
        state: The query whose operators (and `plan`) it gets, if not of `source`.
    """
    folder = target.folder
    folder.make()
    folder.place(NOT_IN_USE, [b""])
    state = state if state is not None else source
    is_rewritten = len(left_out) < len(state.operators)
    edits = (*source.edits, *([rewrite_id] if is_edit else []))
    metadata = query_metadata(source.cut.query_id, rewrite_id, edits, plan)
    for path, data in _files(source, target, shape, metadata, state=state, is_rewritten=is_rewritten):
        watch()
        if not _is_of(path, left_out):
            folder.place(path, [data])


def _files(
    source: StoppedState,
    target: LiveDirectory,
    shape: StateShape,
    metadata: bytes,
    *,
    state: StoppedState,
    is_rewritten: bool,
) -> Iterator[tuple[str, bytes]]:
    kept = {file.path for operator in state.operators for file in operator.files}
    settings = _settings(source.offsets, shape, is_rewritten=is_rewritten)
    number_of = {operator.number: operator for operator in state.operators}
    needed = [file for file in source.cut.needed if not file.path.startswith(f"{STATE}/")]
    needed += [file for file in state.cut.needed if file.path.startswith(f"{STATE}/")]
    for file in needed:
        where, path = f"{file.folder.url}/{file.source}", file.path
        if path == METADATA:
            yield path, metadata
        elif path.startswith(f"{OFFSETS}/"):
            yield path, with_settings(file.read(), where, settings)
        elif path.startswith(f"{COMMITS}/"):
            yield path, with_state_ids(file.read(), where, {} if shape.checkpoint_format == 2 else None)
        elif is_operator_metadata(path):
            operator = number_of[int(path.split("/")[1])]
            # Spark records one partition for a limit, the usual number for other totals.
            partitions = None if operator.name == LIMIT else shape.partitions
            yield path, rewrite_schema_paths(file.read(), where, target.spark_location, partitions=partitions)
        elif path in kept or not path.startswith(f"{STATE}/"):
            yield path, file.read()


def _settings(offsets: OffsetEntry, shape: StateShape, *, is_rewritten: bool) -> dict[str, str]:
    partitions = INTERNAL_PARTITIONS if INTERNAL_PARTITIONS in offsets.conf else SHUFFLE_PARTITIONS
    settings = {partitions: str(shape.partitions)}
    if shape.provider != offsets.provider_class:
        settings[PROVIDER_CLASS] = shape.provider
    # Heap state is written or copied as a whole; a copy keeps its codec.
    if shape.provider == HEAP and is_rewritten:
        settings[COMPRESSION_CODEC] = HEAP_CODEC
    return settings


def write_state_ids(target: LiveDirectory, batch_id: int, state_ids: StateIds) -> None:
    path = f"{COMMITS}/{batch_id}"
    target.folder.write(path, [with_state_ids(target.folder.read(path), f"{target.url}/{path}", state_ids)])


def copy_operators(
    source: StoppedState, target: LiveDirectory, shape: StateShape, operators: Sequence[Operator], watch: Watch
) -> StateIds:
    """Copy operators that the skeleton leaves out, with their state."""
    if operators:
        described = [
            each
            for each in _files(source, target, shape, b"", state=source, is_rewritten=False)
            if _is_of(each[0], operators)
        ]
        state = CommittedState(source.live.folder, source.cut.query_id, list(operators), source.offsets, source.commit)
        held = ((file.path, file.read()) for file in state_files(state).files)
        for path, data in itertools.chain(described, held):
            watch()
            target.folder.place(path, [data])
    ids = source.commit.state_ids or {}
    return {operator.number: ids[operator.number] for operator in operators if operator.number in ids}


def _is_of(path: str, operators: Sequence[Operator]) -> bool:
    return any(path.startswith(f"{STATE}/{operator.number}/") for operator in operators)


class StateStoreName(NamedTuple):
    operator_id: int
    operator: str
    store: str

    def __str__(self) -> str:
        return f"{self.store} of operator {self.operator_id} ({self.operator})"


def stores_of(operators: Sequence[Operator]) -> list[StateStoreName]:
    return [StateStoreName(each.number, each.name, store) for each in operators for store in each.stores]


def state_session(spark: SparkSession, shape: StateShape) -> SparkSession:
    """Return a session as `session_like`, without adaptive execution, which might merge partitions."""
    session = session_like(spark, str(shape.checkpoint_format))
    session.conf.set("spark.sql.adaptive.enabled", "false")
    session.conf.set(SHUFFLE_PARTITIONS, str(shape.partitions))
    # See `require_state_reader`.
    _ = session.streams.active
    return session


def rows_of(session: SparkSession, state: StoppedState, operator: Operator, store: StateStoreName) -> DataFrame:
    """Read rows as bytes, in one partition for each of the state; for a partition key see `RowChange`."""
    from pyspark.sql import functions as F

    assert state.stored is not None
    shape = state.stored.shape
    partitions = 1 if operator.single_partition else shape.partitions
    if shape.provider == HEAP:
        codec = state.offsets.conf.get(COMPRESSION_CODEC, DEFAULT_CODEC)
        heap = HeapStore(state.live.folder, operator.number, store.store, state.batch_id + 1, codec)
        return heap.rows(session, partitions).withColumn("column_family_name", F.lit("default"))
    jvm: Any = session.sparkContext._jvm
    options = jvm.org.apache.spark.sql.execution.datasources.v2.state.StateSourceOptions
    reader = session.read.format("statestore").option("batchId", state.batch_id).option("operatorId", operator.number)
    # Named by Spark: an unknown option would be ignored.
    reader = reader.option(options.INTERNAL_ONLY_READ_ALL_COLUMN_FAMILIES(), "true")
    rows = reader.option("storeName", store.store).load(state.live.spark_location)
    found = rows._jdf.queryExecution().toRdd().getNumPartitions()
    if found != partitions:
        raise StateRewriteError(
            f"{state.live.url}: {store} has {found} directories of partitions, but {partitions} are in use. Take a "
            "snapshot, and rewrite that."
        )
    return rows


# The last column of the key of session windows (`StreamingSessionWindowStateManager`). RocksDB finds the rows of one
# key by the columns before it; it has no part in the choice of the partition.
SESSION_START = "sessionStartTime"
_SESSION = "sessionWindowStateStoreSaveExec"
# Spark treats aggregations, duplicates and state of functions alike here: the whole key decides.
_ANY_OTHER = "stateStoreSave"


@contextmanager
def described(state: StoppedState, watch: Watch) -> Iterator[LiveDirectory]:
    """Provide a copy of a directory of Spark 3.5 or 4.0 for Spark's reader of state, deleted at the end.

    It has the metadata of operators, which 3.5 does not write, and snapshots that not only 4.0 reads.
    """
    copy = state.live.sibling(".described")
    copy.delete()
    try:
        clone(state.live, copy, is_scratch=True, watch=watch)
        partitions = state.stored.shape.partitions if state.stored is not None else 1
        for operator in state.operators:
            if not operator.metadata_version:
                path = f"{STATE}/{operator.number}/_metadata/metadata"
                copy.folder.place(path, [_metadata(operator, partitions)])
        if is_of_spark_4_0(state.live):
            give_snapshots_version(copy, OF_OTHER_RELEASES, watch)
        yield copy
    finally:
        copy.delete()


def is_readable(state: StoppedState) -> bool:
    has_operators = all(operator.metadata_version for operator in state.operators)
    return has_operators and not is_of_spark_4_0(state.live)


@contextmanager
def readable(live: LiveDirectory, watch: Watch = no_op) -> Iterator[LiveDirectory]:
    """Provide the directory, or what `described` makes of it."""
    state = StoppedState.read(live)
    if is_readable(state):
        yield live
        return
    with described(state, watch) as copy:
        yield copy


@contextmanager
def readable_at(live: LiveDirectory, batch_id: int) -> Iterator[LiveDirectory]:
    """Provide a readable copy of a directory at a batch, deleted at the end."""
    copy = live.sibling(f".at-{batch_id}")
    copy.delete()
    try:
        clone(live, copy, at_batch=batch_id, is_scratch=True)
        with readable(copy) as found:
            yield found
    finally:
        copy.delete()


def without_description(target: LiveDirectory, *described: StoppedState) -> None:
    """Delete metadata that `described` added: 3.5 has no use for it, and a later Spark writes its own."""
    if all(operator.metadata_version for state in described for operator in state.operators):
        return
    for number in batch_ids(target.folder, STATE):
        target.sibling(f"/{STATE}/{number}/_metadata").folder.delete_all()


def _metadata(operator: Operator, partitions: int) -> bytes:
    columns = [column["name"] for column in key_columns(operator.files[0])]
    is_session = len(columns) > 1 and columns[-1] == SESSION_START
    name = _SESSION if is_session else _ANY_OTHER if operator.name == UNNAMED else operator.name
    stores = [
        {"storeName": store, "numColsPrefixKey": len(columns) - 1 if is_session else 0, "numPartitions": partitions}
        for store in operator.stores
    ]
    info = {"operatorId": operator.number, "operatorName": name}
    return b"v1\n" + json.dumps({"operatorInfo": info, "stateStoreInfo": stores}, separators=(",", ":")).encode()
