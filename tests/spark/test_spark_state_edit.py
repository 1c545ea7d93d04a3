"""State with other rows: a forgotten key starts from nothing, a replaced row is what the query continues with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from spark_scenarios import run_to_the_end
from stateful_lives import CASES, Life, live, reader_of

from dagster_ckpt.errors import StateRewriteError
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import with_settings
from dagster_ckpt.spark.versions import PINNED_SINCE_OPERATOR_METADATA, Feature
from dagster_ckpt.state.diff import differences, paired
from dagster_ckpt.state.editing import StateEdit, edit_rows, plan_edit
from dagster_ckpt.state.reading import StateName, StateReader
from tests.support.needs import needs, needs_rewriter

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("warm_rewriter"), needs_rewriter()]
in_this_process = needs(Feature.STATE_REWRITER)
# Keys of joins have no names.
CONDITIONS = {"inner-join": "field0 = 2", "left-outer-join": "field0 = 2", "drop-duplicates": "seen = 5"}
CONDITIONS |= {"left-outer-join-v3": "field0 = 2", "full-outer-join-v4": "field0 = 2"}
CONDITIONS |= {"drop-duplicates-within-watermark": "seen = 38"}
WITHOUT_KEYS = ("aggregation-without-key", "limit")


@pytest.fixture(scope="module", params=CASES)
def named_life(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Life]:
    name, backend = request.param
    return name, live(spark, tmp_path_factory.mktemp(name), name, backend)


def edited(
    spark: SparkSession, life: Life, target: Path, edit: StateEdit
) -> tuple[LiveDirectory, StateReader, StateReader]:
    """The directory with the edited state, and readers of what was and of what is."""
    made = LiveDirectory(str(target))
    edit_rows(spark, life.early, made, [edit])
    return made, reader_of(spark, life.early), reader_of(spark, made)


def continued(spark: SparkSession, life: Life, directory: LiveDirectory) -> StateReader:
    """The state after the rest of the input, in a directory that has read half of it."""
    shutil.rmtree(life.work.output, ignore_errors=True)
    if life.early_output.exists():
        shutil.copytree(life.early_output, life.work.output)
    run_to_the_end(spark, life.work, directory, files_per_batch=life.files_per_batch)
    return reader_of(spark, directory)


@pytest.mark.thorough
def test_a_forgotten_key_is_gone_and_every_other_continues(
    spark: SparkSession, tmp_path: Path, named_life: tuple[str, Life]
) -> None:
    name, life = named_life
    condition = CONDITIONS.get(name, "k = 2")
    if name in WITHOUT_KEYS:
        with pytest.raises(StateRewriteError, match=r"keeps a counter|has no key"):
            plan_edit(StateEdit(forget=condition), reader_of(spark, life.early))
        return

    if name.endswith("-v4"):
        with pytest.raises(StateRewriteError, match="damages join state of format v4"):
            edited(spark, life, tmp_path / "edited", StateEdit(forget=condition))
        return

    made, before, after = edited(spark, life, tmp_path / "edited", StateEdit(forget=condition))

    gone = 0
    for state in after.states:
        frame, was = after.frame(state), before.frame(state)
        if set(frame.key_fields) & {"k", "field0", "seen"} and (name not in CONDITIONS or "k" not in frame.key_fields):
            if condition.split()[0] not in frame.key_fields:
                continue
            assert frame.where(condition).count() == 0
            gone += was.where(condition).count()
    assert gone > 0
    late = continued(spark, life, made)
    uninterrupted = life.read(spark, late=True)
    if name.startswith("aggregation-over"):
        # Its lower operator has kept the key, and its upper one counts from nothing.
        return
    for difference in differences(uninterrupted, late, paired(uninterrupted.states, late.states)):
        column = condition.split()[0]
        others = difference.rows.where(~F.col("key").getField(column).eqNullSafe(int(condition.split()[-1])))
        assert others.count() == 0, f"{difference.name} differs in other keys"
    if name == "aggregation-update":
        counts = {row.key.k: row.value[0] for row in late.frame(late.states[0]).rows.collect()}
        # Three rows in each file: all eight files, or the last four of them.
        assert counts == {0: 24, 1: 24, 2: 12, 3: 24}
    if name.startswith("transform"):
        [count] = late.select(state="count")
        counts = {row.key.k: row.value.n for row in late.frame(count).rows.collect()}
        assert counts == {0: 24, 1: 24, 2: 12, 3: 24}


@pytest.mark.state
def test_rows_that_are_replaced_by_themselves_change_nothing(
    spark: SparkSession, tmp_path: Path, named_life: tuple[str, Life]
) -> None:
    _, life = named_life
    before = reader_of(spark, life.early)
    uninterrupted = life.read(spark, late=True)
    for state in before.states:
        rows = before.frame(state).rows
        edit = StateEdit(state.operator_id, replace=rows)
        if state.operator == "globalLimit" or state.operator.startswith(("symmetricHashJoin", "transformWithState")):
            with pytest.raises(StateRewriteError, match=r"(O|o)nly.* forgotten"):
                plan_edit(edit, before)
            continue
        made, _, after = edited(spark, life, tmp_path / f"edited-{state.operator_id}", edit)
        assert after.frame(state).rows.count() == rows.count() > 0
        assert not _differing(before, after)
        assert not _differing(uninterrupted, continued(spark, life, made))


def _differing(left: StateReader, right: StateReader) -> list[StateName]:
    found = differences(left, right, paired(left.states, right.states))
    return [each.name for each in found if not each.is_empty]


def _bumped(rows: DataFrame) -> DataFrame:
    value = F.col("value").withField("count", F.col("value.count") + 1000)
    return rows.select("key", value.alias("value"))


@pytest.mark.thorough
@in_this_process
@pytest.mark.core
def test_a_replaced_row_is_what_the_query_continues_with(spark: SparkSession, tmp_path: Path) -> None:
    life = live(spark, tmp_path, "aggregation-update", "changelog")
    before = reader_of(spark, life.early)
    [name] = before.states
    rows = before.frame(name).rows

    new = rows.where("key.k = 3").select(F.struct(F.lit(9).cast("long").alias("k")).alias("key"), "value")
    made, _, after = edited(
        spark,
        life,
        tmp_path / "edited",
        StateEdit(0, forget="k = 2", replace=_bumped(rows.where("key.k = 1")).unionByName(new)),
    )
    counts = {row.key.k: row.value["count"] for row in after.frame(name).rows.collect()}
    assert counts == {0: 12, 1: 1012, 3: 12, 9: 12}
    late = continued(spark, life, made)
    counts = {row.key.k: row.value["count"] for row in late.frame(late.states[0]).rows.collect()}
    assert counts == {0: 24, 1: 1024, 2: 12, 3: 24, 9: 12}

    # State of a table: nothing of before is left.
    table = _bumped(rows.where("key.k < 2"))
    _, _, bootstrapped = edited(spark, life, tmp_path / "bootstrapped", StateEdit(0, forget="true", replace=table))
    counts = {row.key.k: row.value["count"] for row in bootstrapped.frame(name).rows.collect()}
    assert counts == {0: 1012, 1: 1012}

    for wrong, why in (
        (StateEdit(0, replace=rows.select("key", F.lit(1).alias("value"))), r"column value that is int"),
        (StateEdit(0, replace=rows.select("value")), r"column key that is missing"),
        (StateEdit(0, replace=rows.unionByName(rows)), r"a key several times"),
        (StateEdit(forget="user_id = 7"), r"its key has only the columns k"),
        # Spark would find these below the rows that have the key alone.
        (StateEdit(forget="key.k = 1"), r"its key has only the columns k"),
        (StateEdit(forget="value.count > 1"), r"its key has only the columns k"),
        # Functions, which are the same for every key.
        (StateEdit(forget="user = current_user()"), r"its key has only the columns k"),
        (StateEdit(forget=F.lit(1) == 1), r"its key has only the columns k"),
        (StateEdit(forget="count("), r"The condition is not SQL: \[PARSE_SYNTAX_ERROR\]"),
        (StateEdit(forget="k = array(1)"), r"does not fit the key of default of operator 0.*DATATYPE_MISMATCH"),
    ):
        with pytest.raises(StateRewriteError, match=why):
            plan_edit(wrong, before)
    for every in ("true", F.lit(True)):
        assert plan_edit(StateEdit(forget=every), before).states == (name,)

    path = f"offsets/{before.batch_id}"
    entry = life.early.folder.read(path)
    life.early.folder.write(path, [with_settings(entry, path, {PINNED_SINCE_OPERATOR_METADATA: "avro"})])
    with pytest.raises(StateRewriteError, match="encodingFormat is avro"):
        plan_edit(StateEdit(0, replace=table), before)


@in_this_process
@pytest.mark.core
def test_stores_that_belong_together_are_only_forgotten(spark: SparkSession, tmp_path: Path) -> None:
    life = live(spark, tmp_path, "inner-join", "changelog")
    reader = reader_of(spark, life.early)
    rows = reader.frame(reader.states[0]).rows
    with pytest.raises(StateRewriteError, match="Only keys can be forgotten"):
        plan_edit(StateEdit(0, replace=rows), reader)
    with pytest.raises(StateRewriteError, match="changes nothing"):
        StateEdit(0)
    with pytest.raises(StateRewriteError, match="Name it"):
        StateEdit(replace=rows)
