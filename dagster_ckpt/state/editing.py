"""Edits of state: rows to forget, and rows to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from dagster_ckpt.errors import StateRewriteError
from dagster_ckpt.spark.checkpoint_dir.logs import read_offset_entry
from dagster_ckpt.spark.checkpoint_dir.operators import LIMIT
from dagster_ckpt.spark.versions import PINNED_SINCE_OPERATOR_METADATA
from dagster_ckpt.state.diff import CHANGE, Change, StateDifference
from dagster_ckpt.state.reading import KEY, VALUE, StateFrame, StateKind, StateName, StateReader, cause_in
from dagster_ckpt.state.stopped_state import StateStoreName
from dagster_ckpt.state.unsafe_rows import FAMILY, KEY_BYTES, PARTITION_KEY, VALUE_BYTES, encoder, plain

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_DEFAULT = "default"
_NO_SUCH_COLUMN = ("UNRESOLVED_COLUMN", "FIELD_NOT_FOUND")
_ENCODING = PINNED_SINCE_OPERATOR_METADATA


@dataclass(frozen=True)
class StateEdit:
    """A change of the rows of state. Rows are forgotten first, then replaced; of several edits, the last decides.

    Attributes:
        operator: Number or name; None for every operator whose key has the columns of `forget`.
        forget: Keys to forget: a condition on the fields of the key, as a column or in SQL.
        replace: Rows with the columns `key` and `value` as `StreamState.rows` returns them; each replaces the row with
            its key.

    Example:
        >>> StateEdit(forget="user_id = 7")
        >>> StateEdit(0, replace=state.rows().where("key.user_id = 7").withColumn("value", corrected))
    """

    operator: int | str | None = None
    forget: Column | str | None = None
    replace: DataFrame | None = None

    def __post_init__(self) -> None:
        if self.forget is None and self.replace is None:
            raise StateRewriteError("The edit changes nothing. Name the keys to forget, or the rows to write.")
        if self.replace is not None and self.operator is None:
            raise StateRewriteError("The rows to write belong to one operator. Name it.")


@dataclass(frozen=True)
class PlannedEdit:
    """An edit checked against its state; the keys of the `skipped` states lack the columns of `forget`."""

    edit: StateEdit
    reader: StateReader
    states: tuple[StateName, ...]
    skipped: tuple[StateName, ...]

    def changes(self, store: StateStoreName) -> bool:
        return store.operator_id in {name.operator_id for name in self.states}

    def apply(self, store: StateStoreName, rows: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        if not self.changes(store):
            return rows
        if self.edit.forget is not None:
            rows = _without(rows, self.edit.forget, PARTITION_KEY)
        if self._encoded is None:
            return rows
        new = self._encoded.select(_partition_key(rows), KEY_BYTES, VALUE_BYTES, F.lit(_DEFAULT).alias(FAMILY))
        kept = rows.join(new.select(KEY_BYTES), on=KEY_BYTES, how="left_anti")
        return kept.select(new.columns).unionByName(new)

    @cached_property
    def _encoded(self) -> DataFrame | None:
        from pyspark.sql import functions as F

        if self.edit.replace is None:
            return None
        [name] = self.states
        schema = self.reader.frame(name).rows.schema
        columns = [F.col(KEY)]
        for column, into in ((KEY, KEY_BYTES), (VALUE, VALUE_BYTES)):
            kind = schema[column].dataType
            columns.append(encoder(kind, f"{column} of {name}")(plain(F.col(column), kind)).alias(into))
        return self.edit.replace.select(*columns)


def plan_edit(edit: StateEdit, reader: StateReader) -> PlannedEdit:
    wanted = reader.select(edit.operator)
    states, skipped = list(wanted), []
    if edit.forget is not None:
        fits = {name: _can_forget(reader.frame(name), edit.forget) for name in wanted}
        skipped = [name for name, why in fits.items() if why is not None]
        states = [name for name in wanted if name not in skipped]
        if not states or (skipped and edit.operator is not None):
            reasons = " ".join(f"{name}: {why}" for name, why in fits.items() if why is not None)
            raise StateRewriteError(f"No key can be forgotten like this. {reasons or 'The query keeps no state.'}")
    if edit.replace is not None:
        _check_replacement(edit.replace, reader, states)
    return PlannedEdit(edit, reader, tuple(states), tuple(skipped))


def check_edited(planned: Sequence[PlannedEdit], difference: StateDifference, after: StateReader) -> None:
    from pyspark.sql import functions as F

    unasked, name = difference.rows, difference.name
    left = after.frame(name).rows
    later: list[StateEdit] = []
    for edit in (each for each in reversed(planned) if name in each.states):
        if edit.edit.forget is not None:
            is_removed = F.col(CHANGE) == Change.REMOVED.value
            unasked = unasked.where(~is_removed).unionByName(_without(unasked.where(is_removed), edit.edit.forget, KEY))
        if edit.edit.replace is not None:
            asked = edit.edit.replace.select(KEY, VALUE)
            unasked = _other_keys(unasked, asked)
            asked = _undecided(asked, later)
            written = left.select(KEY, VALUE).intersect(asked).count()
            if written != asked.distinct().count():
                raise _wrong(name, f"only {written} of the rows to write exist")
            left = _other_keys(left, asked)
        if edit.edit.forget is not None and (kept := left.count() - _without(left, edit.edit.forget, KEY).count()):
            raise _wrong(name, f"{kept} rows that were to be forgotten are still there")
        later.append(edit.edit)
    if wrong := unasked.count():
        raise _wrong(name, f"{wrong} rows changed that the edit does not name")


def _undecided(rows: DataFrame, later: Sequence[StateEdit]) -> DataFrame:
    for edit in later:
        rows = rows if edit.forget is None else _without(rows, edit.forget, KEY)
        rows = rows if edit.replace is None else _other_keys(rows, edit.replace)
    return rows


def _other_keys(rows: DataFrame, asked: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    keys = asked.select(F.col(KEY).alias("__asked"))
    return rows.join(keys, F.col(KEY).eqNullSafe(F.col("__asked")), "left_anti")


def _wrong(name: StateName, what: str) -> StateRewriteError:
    return StateRewriteError(
        f"The edited state {name} does not match the edit: {what}. No savepoint was made. Please report this, with "
        "the versions of Spark and dagster-ckpt."
    )


def _can_forget(frame: StateFrame, condition: Column | str) -> str | None:
    from pyspark.errors import AnalysisException, ParseException

    if frame.name.operator == LIMIT:
        return "a limit keeps a counter and no keys."
    if not frame.key_fields:
        return "it has no key, all rows of the input are in one value."
    other = f"its key has only the columns {', '.join(frame.key_fields)}."
    try:
        left = _unmet(_with_fields(frame.rows, KEY), condition)
    except ParseException as error:
        raise StateRewriteError(f"The condition is not SQL: {cause_in(error)} Nothing was changed.") from error
    except AnalysisException as error:
        if (error.getCondition() or "").startswith(_NO_SUCH_COLUMN):
            return other
        raise StateRewriteError(
            f"The condition does not fit the key of {frame.name}: {cause_in(error)} Nothing was changed."
        ) from error
    # Spark may take an unknown name for a function: `user` is the current user.
    names_a_column = not left._jdf.queryExecution().analyzed().condition().references().isEmpty()
    return None if names_a_column or _is_true(condition) else other


def _is_true(condition: Column | str) -> bool:
    return (condition if isinstance(condition, str) else str(condition)[8:-2]).strip().lower() == "true"


def _without(rows: DataFrame, condition: Column | str, key: str) -> DataFrame:
    """Null counts as not met."""
    from pyspark.sql import functions as F

    left = _unmet(_with_fields(rows, key), condition)
    return left.select(*(F.col(f"__{name}").alias(name) for name in rows.columns))


def _with_fields(rows: DataFrame, key: str) -> DataFrame:
    from pyspark.sql import functions as F

    fields = rows.select(f"{key}.*").columns
    assert not set(fields) & {f"__{name}" for name in rows.columns}
    # Without an alias, a condition would find columns below, such as `value`.
    return rows.select(*(F.col(name).alias(f"__{name}") for name in rows.columns), F.col(f"{key}.*")).alias("__rows")


def _unmet(rows: DataFrame, condition: Column | str) -> DataFrame:
    from pyspark.sql import functions as F

    met = F.expr(condition) if isinstance(condition, str) else condition
    return rows.where(~F.coalesce(met, F.lit(False)))


def _check_replacement(replacement: DataFrame, reader: StateReader, states: Sequence[StateName]) -> None:
    if len(states) != 1 or states[0].state != _DEFAULT or states[0].operator == LIMIT:
        named = "; ".join(map(str, states))
        raise StateRewriteError(
            f"Rows of this operator cannot be replaced ({named}): it keeps several stores in step, or a counter. Only "
            "keys can be forgotten."
        )
    frame = reader.frame(states[0])
    if frame.kind is not StateKind.VALUE or "storeName" not in states[0].options:
        raise StateRewriteError(
            f"Rows of {states[0]} cannot be replaced, only forgotten: it is state of your own code."
        )
    encoding = read_offset_entry(reader.live.folder, reader.batch_id).conf.get(_ENCODING)
    if encoding not in (None, "unsaferow"):
        raise StateRewriteError(
            f"Rows of {states[0]} cannot be replaced, only forgotten: {_ENCODING} is {encoding}, and dagster_ckpt "
            "writes rows as unsaferow. Nothing was changed."
        )
    for column in (KEY, VALUE):
        wanted = frame.rows.schema[column].dataType
        found = replacement.schema[column].dataType.simpleString() if column in replacement.columns else "missing"
        if found != wanted.simpleString():
            raise StateRewriteError(
                f"The rows to write have a column {column} that is {found}, but that of {states[0]} is "
                f"{wanted.simpleString()}. Cast it; nothing was changed."
            )
        encoder(wanted, f"{column} of {states[0]}")
    if replacement.groupBy(KEY).count().where("count > 1").count():
        raise StateRewriteError(
            f"The rows to write have a key several times, but {states[0]} has one row for each key."
        )


def _partition_key(rows: DataFrame) -> Column:
    from pyspark.sql import functions as F

    fields = [F.col(KEY).getField(name).alias(name) for name in rows.select(f"{PARTITION_KEY}.*").columns]
    return F.struct(*fields).cast(rows.schema[PARTITION_KEY].dataType).alias(PARTITION_KEY)
