"""State and differences of state as small tables of text, for pages and terminals, and as Parquet files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dagster_ckpt.errors import OptionError
from dagster_ckpt.operations.state_browsing import StreamState, StreamStateDiff
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.state.diff import AFTER, BEFORE, CHANGE, ROWS
from dagster_ckpt.state.reading import KEY, MAP_KEY, VALUE, StateName, attempt
from dagster_ckpt.values.storage_path import location_url

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# With the microseconds that Spark keeps, which to_json would cut off.
_TIMES = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    "ignoreNullFields": "false",
}
DEFAULT_LIMIT = 50
LARGEST = 10


@dataclass(frozen=True)
class LargestKey:
    """A key with much state.

    Attributes:
        key: The key as JSON.
        rows: Number of its rows.
        bytes: Size of its values as JSON.
    """

    key: str
    rows: int
    bytes: int


@dataclass(frozen=True)
class ShownState:
    """A part of one state.

    Attributes:
        operator_id: Number of the operator in the plan.
        operator: Spark's name for it.
        state: Name of the state.
        rows: Number of rows that meet the condition.
        columns: Names of the columns shown.
        first: The first rows; each cell is JSON, or a number as text.
        largest: The keys with the largest values, largest first.
    """

    operator_id: int
    operator: str
    state: str
    rows: int
    columns: tuple[str, ...]
    first: tuple[tuple[str, ...], ...]
    largest: tuple[LargestKey, ...] = ()


@dataclass(frozen=True)
class ShownDifference:
    """A part of the differences of one state.

    Attributes:
        operator_id: Number of the operator in the plan.
        operator: Spark's name for it.
        state: Name of the state.
        counts: Number of rows by change.
        columns: Names of the columns shown.
        first: The first differences; each cell is JSON, or a number as text.
        note: Why every row differs, or None.
    """

    operator_id: int
    operator: str
    state: str
    counts: dict[str, int]
    columns: tuple[str, ...]
    first: tuple[tuple[str, ...], ...]
    note: str | None = None


def show_state(
    state: StreamState, *, where: str | None = None, limit: int = DEFAULT_LIMIT, largest: int = LARGEST
) -> list[ShownState]:
    """Read a part of every selected state.

    Args:
        state: The state.
        where: A condition in SQL on fields of the key by name, or on `key`, `value` and `partition`.
        limit: Number of rows of each state.
        largest: Number of the largest keys of each state; 0 leaves them out, which saves a pass.

    Raises:
        OptionError: The condition names a column that a state does not have.
        LiveDirectoryError: Spark cannot read a state.
    """
    return [_shown(state, name, where, limit, largest) for name in state.states]


def show_differences(diff: StreamStateDiff, *, limit: int = DEFAULT_LIMIT) -> list[ShownDifference]:
    """Compute every difference, and the first rows of each.

    Args:
        diff: The differences.
        limit: Number of rows of each state.

    Raises:
        LiveDirectoryError: Spark cannot read a state.
    """
    shown = []
    for state in diff.states:
        counts = {change.value: number for change, number in state.counts.items()}
        columns = tuple(state.rows.columns)
        first = _texts(state.rows, [CHANGE, KEY], limit) if any(counts.values()) else ()
        name = state.name
        shown.append(ShownDifference(name.operator_id, name.operator, name.state, counts, columns, first, state.note))
    return shown


def write_rows(tables: Iterable[tuple[StateName, DataFrame]], folder: str) -> list[str]:
    """Write all rows as Parquet, each state into its own folder below `folder`.

    Args:
        tables: The states and their rows.
        folder: Absolute path or URL of a folder, which executors must reach.

    Returns:
        The URLs that were written.

    Raises:
        OptionError: The folder is a relative path, or has such rows already.
        LiveDirectoryError: Spark cannot read a state, or cannot write there.
    """
    root = location_url("write_to", folder).rstrip("/")
    placed = {f"{root}/operator={name.operator_id}/state={name.state}": (name, rows) for name, rows in tables}
    for url in placed:
        if LiveDirectory(url).exists():
            raise OptionError(f"write_to: {url} exists already, and is not overwritten. Name another folder.")
    for url, (name, rows) in placed.items():
        attempt(partial(rows.write.parquet, url), LiveDirectory(url), f"{name}, or write its rows there")
    return list(placed)


def _shown(state: StreamState, name: StateName, where: str | None, limit: int, largest: int) -> ShownState:
    frame = state.frame(name)
    rows = frame.where(where) if where is not None else frame.rows
    what = str(name) if where is None else f"{name}, with the condition {where!r}"
    number = attempt(rows.count, state.live, what)
    keys = _largest(state, name, rows, largest) if largest and number else ()
    columns = tuple(rows.columns)
    first = attempt(lambda: _texts(rows, [], limit), state.live, str(name))
    return ShownState(name.operator_id, name.operator, name.state, number, columns, first, keys)


def _largest(state: StreamState, name: StateName, rows: DataFrame, number: int) -> tuple[LargestKey, ...]:
    from pyspark.sql import functions as F  # noqa: PLC0415 - Spark is optional

    size = F.octet_length(_text(rows, VALUE))
    by_key = rows.select(_text(rows, KEY).alias(KEY), size.alias("bytes")).groupBy(KEY)
    found = by_key.agg(F.count("*").alias(ROWS), F.sum("bytes").alias("bytes")).orderBy(F.desc("bytes"), KEY)
    rows_of = attempt(found.limit(number).collect, state.live, str(name))
    return tuple(LargestKey(row[0], int(row[1]), int(row[2])) for row in rows_of)


def _texts(rows: DataFrame, order: Sequence[str], limit: int) -> tuple[tuple[str, ...], ...]:
    shown = rows.select(*(_text(rows, column).alias(column) for column in rows.columns))
    if order:
        shown = shown.orderBy(*order)
    return tuple(tuple("" if cell is None else str(cell) for cell in row) for row in shown.limit(limit).collect())


def _text(rows: DataFrame, column: str) -> Column:
    from pyspark.sql import functions as F  # noqa: PLC0415 - Spark is optional

    if column in (KEY, MAP_KEY, VALUE, BEFORE, AFTER) and "<" in rows.schema[column].dataType.simpleString():
        return F.to_json(F.col(column), _TIMES)
    return F.col(column).cast("string")
