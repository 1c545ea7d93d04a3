"""Reads the state of a snapshot or a live directory, from temporary copies, which `close` deletes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from dagster_ckpt.client.description import find_snapshot
from dagster_ckpt.errors import NothingCommittedError, OptionError, SparkNotFoundError
from dagster_ckpt.recovery.live_directories import restore_into, scratch_directory, snapshot_location
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import clone
from dagster_ckpt.spark.query.description import quoted
from dagster_ckpt.spark.query.session import active_session
from dagster_ckpt.state.diff import CHANGE, ROWS, StateDifference, differences, paired
from dagster_ckpt.state.reading import (
    KEY,
    VALUE,
    StateFrame,
    StateName,
    attempt,
    require_state_reader,
    storable,
)
from dagster_ckpt.state.rewriter import Rewriter, readers_of
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import describe_snapshot, holding
from dagster_ckpt.values.storage_path import location_url

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

LIVE = "live"


class StreamState(ExitStack):
    """Result of `Client.state`: the state after one batch.

    Frames are lazy: use them before `close`. The snapshot cannot be deleted until then.
    """

    def __init__(
        self,
        stream: StreamHandle,
        snapshot: str,
        *,
        spark: SparkSession | None = None,
        operator: int | str | None = None,
        state: str | None = None,
    ) -> None:
        super().__init__()
        self.spark = spark if spark is not None else session_of_process()
        if Rewriter.find() is None:
            require_state_reader(self.spark)
        try:
            self.live = self.enter_context(scratch_directory(stream))
            self.snapshot = None if snapshot == LIVE else find_snapshot(stream.catalog, stream.stream_id, snapshot)
            if self.snapshot is None:
                self.batch_id = clone(_live_directory(stream), self.live, is_scratch=True).batch_id
            else:
                self.enter_context(holding(stream.catalog, [self.snapshot], "reader of state"))
                restore_into(stream, snapshot_location(self.snapshot), self.live, is_scratch=True)
                self.batch_id = _batch_of(self.live)
            self.reader = self.enter_context(readers_of(self.spark, self.live, [self.batch_id]))[self.batch_id]
            self.states = tuple(self.reader.select(operator, state))
        except BaseException:
            self.close()
            raise

    def frame(self, name: StateName | None = None) -> StateFrame:
        return self.reader.frame(name if name is not None else self._only())

    def rows(self, operator: int | str | None = None, state: str | None = None) -> DataFrame:
        """Return the rows of one state: columns `key`, `value` and `partition`, and `map_key` for a map.

        Operator (number or name) and state can be left out if only one is selected.
        """
        found = [name for name in self.reader.select(operator, state) if name in self.states]
        return self.reader.frame(self._only(found)).rows

    def __str__(self) -> str:
        if self.snapshot is not None:
            return describe_snapshot(self.snapshot)
        return f"the live directory at batch {self.batch_id}"

    def _only(self, found: list[StateName] | None = None) -> StateName:
        names = list(self.states) if found is None else found
        if len(names) == 1:
            return names[0]
        listed = "; ".join(map(str, self.states))
        raise OptionError(
            f"{len(names)} states are selected. Name one by operator and state. There are: {listed}."
            if self.states
            else "The query keeps no state, so there are no rows to read."
        )


class StreamStateDiff(ExitStack):
    """Result of `Client.state_diff`.

    A snapshot and its rescaled or converted copy do not differ.
    """

    def __init__(
        self,
        stream: StreamHandle,
        before: str,
        after: str,
        *,
        spark: SparkSession | None = None,
        operator: int | str | None = None,
        state: str | None = None,
    ) -> None:
        super().__init__()
        try:
            self.before, self.after = (
                self.enter_context(StreamState(stream, point, spark=spark, operator=operator, state=state))
                for point in (before, after)
            )
        except BaseException:
            self.close()
            raise

    @cached_property
    def states(self) -> Sequence[StateDifference]:
        return differences(self.before.reader, self.after.reader, paired(self.before.states, self.after.states))

    @property
    def is_empty(self) -> bool:
        return all(state.is_empty for state in self.states)


def session_of_process() -> SparkSession:
    found = active_session()
    if found is None:
        raise SparkNotFoundError(
            "This process has no Spark session, and Spark reads the state. Pass one with spark=..., such as "
            "SparkSession.builder.getOrCreate()."
        )
    return found


def _live_directory(stream: StreamHandle) -> LiveDirectory:
    url = stream.catalog.streams.get(stream.stream_id).live_directory
    if url is None:
        raise NothingCommittedError(
            f"Stream {stream.stream_id!r} has no live directory: it never ran, or was canceled with its state. Name a "
            "snapshot instead."
        )
    return LiveDirectory(url)


def _batch_of(live: LiveDirectory) -> int:
    commit = live.positions().commit
    if commit is None:
        raise NothingCommittedError(f"{live.url} has no committed batch, so there is no state to read.")
    return commit


# Spark keeps microseconds, which to_json cuts off by default.
_TIMES = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    "ignoreNullFields": "false",
}
DEFAULT_LIMIT = 50
LARGEST = 10


@dataclass(frozen=True)
class LargestKey:
    """A key, and the size of its values as JSON."""

    key: str
    rows: int
    bytes: int


@dataclass(frozen=True)
class ShownState:
    """The first rows of a state; each cell is JSON, or a number as text."""

    operator_id: int
    operator: str
    state: str
    rows: int
    columns: tuple[str, ...]
    first: tuple[tuple[str, ...], ...]
    largest: tuple[LargestKey, ...] = ()


@dataclass(frozen=True)
class ShownDifference:
    """The first differing rows of a state, as `ShownState`; if every row differs, `note` says why."""

    operator_id: int
    operator: str
    state: str
    counts: dict[str, int]
    columns: tuple[str, ...]
    first: tuple[tuple[str, ...], ...]
    note: str | None = None


def written_rows(found: StreamState | StreamStateDiff, folder: str | None, *, where: str | None = None) -> list[str]:
    if folder is None:
        return []
    if isinstance(found, StreamStateDiff):
        return write_rows(((each.name, each.rows) for each in found.states), folder)
    frames = (found.frame(name) for name in found.states)
    return write_rows(((each.name, each.rows if where is None else each.where(where)) for each in frames), folder)


def show_state(
    state: StreamState, *, where: str | None = None, limit: int = DEFAULT_LIMIT, largest: int = LARGEST
) -> list[ShownState]:
    """Return `limit` rows and the `largest` keys of each state; `largest` 0 saves a pass.

    `where` is a condition in SQL on fields of the key by name, or on `key`, `value` and `partition`.
    """
    return [_shown(state, name, where, limit, largest) for name in state.states]


def show_differences(diff: StreamStateDiff, *, limit: int = DEFAULT_LIMIT) -> list[ShownDifference]:
    return [show_difference(state, limit=limit) for state in diff.states]


def show_difference(state: StateDifference, *, limit: int = DEFAULT_LIMIT) -> ShownDifference:
    counts = {change.value: number for change, number in state.counts.items()}
    columns = tuple(state.rows.columns)
    first = texts(state.rows, [CHANGE, KEY], limit) if any(counts.values()) else ()
    name = state.name
    return ShownDifference(name.operator_id, name.operator, name.state, counts, columns, first, state.note)


def write_rows(tables: Iterable[tuple[StateName, DataFrame]], folder: str) -> list[str]:
    """Write all rows as Parquet, a folder per state below `folder`; returns their URLs.

    Executors must reach the folder, an absolute path or URL. Nothing is overwritten.
    """
    return write_frames({f"operator={name.operator_id}/state={name.state}": rows for name, rows in tables}, folder)


def write_frames(frames: Mapping[str, DataFrame], folder: str) -> list[str]:
    root = location_url("write_to", folder).rstrip("/")
    for place in frames:
        if LiveDirectory(f"{root}/{place}").exists():
            raise OptionError(f"write_to: {root}/{place} exists already, and is not overwritten. Name another folder.")
    for place, rows in frames.items():
        url = f"{root}/{place}"
        attempt(partial(storable(rows).write.parquet, url), LiveDirectory(url), f"{place}, or write its rows there")
    return [f"{root}/{place}" for place in frames]


def _shown(state: StreamState, name: StateName, where: str | None, limit: int, largest: int) -> ShownState:
    frame = state.frame(name)
    rows = frame.where(where) if where is not None else frame.rows
    what = str(name) if where is None else f"{name}, with the condition {where!r}"
    number = attempt(rows.count, state.live, what)
    keys = _largest(state, name, rows, largest) if largest and number else ()
    columns = tuple(rows.columns)
    first = attempt(lambda: texts(rows, [], limit), state.live, str(name))
    return ShownState(name.operator_id, name.operator, name.state, number, columns, first, keys)


def _largest(state: StreamState, name: StateName, rows: DataFrame, number: int) -> tuple[LargestKey, ...]:
    from pyspark.sql import functions as F

    size = F.octet_length(_text(rows, VALUE))
    by_key = rows.select(_text(rows, KEY).alias(KEY), size.alias("bytes")).groupBy(KEY)
    found = by_key.agg(F.count("*").alias(ROWS), F.sum("bytes").alias("bytes")).orderBy(F.desc("bytes"), KEY)
    rows_of = attempt(found.limit(number).collect, state.live, str(name))
    return tuple(LargestKey(row[0], int(row[1]), int(row[2])) for row in rows_of)


def texts(rows: DataFrame, order: Sequence[str], limit: int) -> tuple[tuple[str, ...], ...]:
    shown = rows.select(*(_text(rows, column).alias(column) for column in rows.columns))
    if order:
        shown = shown.orderBy(*order)
    return tuple(tuple("" if cell is None else str(cell) for cell in row) for row in shown.limit(limit).collect())


def _text(rows: DataFrame, column: str) -> Column:
    from pyspark.sql import functions as F

    named = F.col(quoted(column))
    if "<" in rows.schema[column].dataType.simpleString():
        return F.to_json(named, _TIMES)
    return named.cast("string")
