"""Edits of state: rows to forget, and rows to write instead.

An edit rewrites the state of a stopped query into another directory and compares the result with the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from dagster_ckpt.errors import StateRewriteError, UnsupportedSparkError
from dagster_ckpt.io.file_io import no_op
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import read_offset_entry
from dagster_ckpt.spark.checkpoint_dir.operators import LIMIT
from dagster_ckpt.spark.checkpoint_dir.restore import Watch
from dagster_ckpt.spark.jobs import JobProgress, in_job_group
from dagster_ckpt.spark.versions import PINNED_SINCE_OPERATOR_METADATA
from dagster_ckpt.state.diff import CHANGE, Change, StateDifference, differences, paired
from dagster_ckpt.state.reading import (
    KEY,
    VALUE,
    StateFrame,
    StateKind,
    StateName,
    StateReader,
    cause_in,
    storable,
    unstored,
)
from dagster_ckpt.state.rewriter import OrderedEdit, Rewriter, rewrite_elsewhere, rewriter_for
from dagster_ckpt.state.rewriting import rewrite_state
from dagster_ckpt.state.stopped_state import StateStoreName, StoppedState, readable, without_description
from dagster_ckpt.state.unsafe_rows import FAMILY, KEY_BYTES, PARTITION_KEY, VALUE_BYTES, encoder, plain

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

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
    """An edit checked against its state; keys of the `skipped` states lack the columns of `forget`."""

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


@dataclass(frozen=True)
class EditedRows:
    rewrite_id: str
    batch_id: int
    changes: Mapping[StateName, Mapping[Change, int]]
    skipped: tuple[StateName, ...]

    def as_record(self) -> dict[str, object]:
        changes = [
            [name.as_record(), {c.value: rows for c, rows in counts.items()}] for name, counts in self.changes.items()
        ]
        skipped = [name.as_record() for name in self.skipped]
        return {"rewrite_id": self.rewrite_id, "batch_id": self.batch_id, "changes": changes, "skipped": skipped}

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> EditedRows:
        changes = {StateName(*name): {Change(c): n for c, n in counts.items()} for name, counts in record["changes"]}
        skipped = tuple(StateName(*name) for name in record["skipped"])
        return EditedRows(record["rewrite_id"], record["batch_id"], changes, skipped)


def edit_rows(
    spark: SparkSession,
    source: LiveDirectory,
    target: LiveDirectory,
    edits: Sequence[StateEdit],
    *,
    watch: Watch = no_op,
    report: Callable[[str], None] = lambda _message: None,
) -> EditedRows:
    """Edit the state after the newest batch of a directory, in a new directory, which is deleted on any error.

    The last of the `edits` decides about a row.

    Raises:
        StateRewriteError: An edit does not fit the state, or something else changed.
        UnsupportedSparkError: No Spark here can do it, or the other one cannot get a condition.
    """
    other, state = rewriter_for(spark), StoppedState.read(source)
    if state.stored is None:
        raise StateRewriteError("The query keeps no state, so there is nothing to edit. Nothing was changed.")
    if other is not None:
        return _edit_elsewhere(other, spark, state, target, edits, watch=watch, report=report)
    with readable(source, watch) as described:
        before = StateReader(spark, described, state.batch_id)
        # Check all edits before the first is carried out.
        planned = [plan_edit(edit, before) for edit in edits]

        def change(store: StateStoreName, rows: DataFrame) -> DataFrame:
            for edit in planned:
                rows = edit.apply(store, rows)
            return rows

        made = rewrite_state(spark, described, target, change_rows=change, watch=watch, report=report)
        report("comparing the edited state with the original")
        try:
            after, progress = StateReader(spark, target, made.batch_id), JobProgress(report)
            check = partial(_checked, planned, before, after, progress)
            what = f"check edited state: {target.url}"
            changes = in_job_group(spark.sparkContext, what, check, watch, progress)
            without_description(target, state)
        except BaseException:
            target.delete()
            raise
    skipped = tuple(dict.fromkeys(name for edit in planned for name in edit.skipped))
    return EditedRows(made.rewrite_id, made.batch_id, changes, skipped)


def _checked(
    planned: Sequence[PlannedEdit], before: StateReader, after: StateReader, progress: JobProgress
) -> dict[StateName, Mapping[Change, int]]:
    edited = {name for edit in planned for name in edit.states}
    changes = {}
    for difference in differences(before, after, paired(before.states, after.states)):
        progress.step = f"comparing {difference.name}"
        if difference.name in edited:
            check_edited(planned, difference, after)
            changes[difference.name] = difference.counts
        elif not difference.is_empty:
            raise _wrong(difference.name, "it differs although no edit names it")
    return changes


def _edit_elsewhere(
    rewriter: Rewriter,
    spark: SparkSession,
    state: StoppedState,
    target: LiveDirectory,
    edits: Sequence[StateEdit],
    *,
    watch: Watch,
    report: Callable[[str], None],
) -> EditedRows:
    given = target.sibling(".given")
    given.delete()
    try:
        ordered = []
        for number, edit in enumerate(edits):
            if edit.forget is not None and not isinstance(edit.forget, str):
                raise UnsupportedSparkError(
                    f"Another Spark edits the state for this Spark {spark.version}, and it cannot get a condition that "
                    'is a column. Give it as SQL, such as StateEdit(forget="user_id = 7"). Nothing was changed.'
                )
            rows = None
            if edit.replace is not None:
                rows = given.sibling(f"/{number}")
                storable(edit.replace.select(KEY, VALUE)).write.parquet(rows.spark_location)
            ordered.append(OrderedEdit(edit.operator, edit.forget, rows))
        report("another Spark edits the state")
        assert state.stored is not None
        answer = rewrite_elsewhere(
            rewriter, spark, state.live, target, state.stored.shape, edits=ordered, watch=watch, report=report
        )
    finally:
        given.delete()
    return EditedRows.of_record(answer)


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
    if edit.replace is not None and len(states) == 1:
        kinds = reader.frame(states[0]).rows.schema
        edit = replace(edit, replace=unstored(edit.replace, {each.name: each.dataType for each in kinds.fields}))
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
    """Keep the rows for which the condition is null or false."""
    from pyspark.sql import functions as F

    left = _unmet(_with_fields(rows, key), condition)
    return left.select(*(F.col(f"__{name}").alias(name) for name in rows.columns))


def _with_fields(rows: DataFrame, key: str) -> DataFrame:
    from pyspark.sql import functions as F

    fields = rows.select(f"{key}.*").columns
    assert not set(fields) & {f"__{name}" for name in rows.columns}
    # Without an alias, a condition would find columns of `rows`, such as `value`.
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
    # Every column that is read from a file is nullable.
    return F.struct(*fields).cast(_nullable(rows.schema[PARTITION_KEY].dataType)).alias(PARTITION_KEY)


def _nullable(kind: DataType) -> DataType:
    from pyspark.sql.types import ArrayType, StructField, StructType

    if isinstance(kind, StructType):
        return StructType([StructField(each.name, _nullable(each.dataType)) for each in kind.fields])
    return ArrayType(_nullable(kind.elementType)) if isinstance(kind, ArrayType) else kind
