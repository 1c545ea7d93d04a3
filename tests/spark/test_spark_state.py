"""The state of every operator, read and compared: which rows it has, and what two states of a query differ in."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from spark_scenarios import HEAP, Workload, run_to_the_end, stateless
from spark_stateful_queries import IN_ONE_PARTITION, counts_over_a_join
from stateful_lives import CASES, Life, live, reader_of

from dagster_ckpt.errors import LiveDirectoryError, OptionError, StateRewriteError, UnsupportedSparkError
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.state_files import ROCKSDB
from dagster_ckpt.spark.versions import Feature, installed_release
from dagster_ckpt.state.diff import Change, StateDifference, comparable, differences, paired
from dagster_ckpt.state.reading import StateFrame, StateKind, StateReader, require_state_reader
from dagster_ckpt.state.rewriting import rewrite_state, stored_state
from dagster_ckpt.state.stopped_state import StateShape, StoredState, check_rewrite
from tests.support.needs import needs, needs_rewriter

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("warm_rewriter")]
KEYS = 4


@pytest.fixture(scope="module", params=CASES)
def life(request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Life:
    name, backend = request.param
    return live(spark, tmp_path_factory.mktemp(name), name, backend)


@pytest.mark.thorough(but="aggregation-by-window-heap")
def test_every_state_of_every_operator_is_read(spark: SparkSession, life: Life) -> None:
    reader = life.read(spark, late=True)

    frames = {(state.operator_id, state.state): reader.frame(state) for state in reader.states}

    assert {state: frame.kind for state, frame in frames.items()} == life.query.states
    for frame in frames.values():
        more = ["map_key"] if frame.kind is StateKind.MAP else []
        assert frame.rows.columns == ["key", *more, "value", "partition"]
        assert {row.partition for row in frame.rows.select("partition").collect()} <= set(range(3))
    rows = {(each.operator_id, each.state): each.rows for each in reader.count()}
    assert any(rows.values())
    _check_content(life, reader, rows)


def _check_content(life: Life, reader: StateReader, rows: dict[tuple[int, str], int]) -> None:
    if (0, "by_rest") in rows:
        # Each key has three values in a file, and a file adds a multiple of five.
        assert rows[0, "by_rest"] == 3 * KEYS
        assert rows[0, "count"] == rows[0, "recent"] == KEYS
        [counts] = reader.select(state="count")
        assert {row.value.n for row in reader.frame(counts).rows.collect()} == {3 * 8}
        [recent] = reader.select(state="recent")
        # In the order in which the processor keeps them: three of before, and two of the last batch.
        for row in reader.frame(recent).rows.collect():
            values = [each.v for each in row.value]
            assert len(values) == 5
            assert max(values[:3]) < min(values[3:])
    if life.query.build.__name__ == "one_total":
        [only] = reader.frame(reader.states[0]).rows.collect()
        assert (only.value[0], only.partition) == (8 * 12, 0)


def compared(before: StateReader, after: StateReader) -> list[StateDifference]:
    return differences(before, after, paired(before.states, after.states))


@pytest.mark.thorough(but="aggregation-by-window-heap")
def test_the_differences_lead_from_one_state_to_the_other(spark: SparkSession, life: Life) -> None:
    early, late = life.read(spark, late=False), life.read(spark, late=True)

    assert all(state.is_empty for state in compared(late, late))

    changes = compared(early, late)
    assert any(not state.is_empty for state in changes)
    for (old, new), state in zip(paired(early.states, late.states), changes, strict=True):
        assert old is not None
        assert new is not None
        assert state.note is None
        assert sum(state.counts.values()) == sum(row.rows for row in state.rows.collect())
        assert applied(state, early.frame(old)) == content(late.frame(new))


@pytest.mark.thorough(but="aggregation-by-window-heap")
@needs_rewriter()
def test_a_rescaled_or_converted_state_differs_in_nothing(spark: SparkSession, tmp_path: Path, life: Life) -> None:
    """And another state differs from the copy in the same rows as from the original."""
    early, late = life.read(spark, late=False), life.read(spark, late=True)
    changes = [state.counts for state in compared(early, late)]
    for number, shape in enumerate(other_shapes(life.late)):
        copy = LiveDirectory(str(tmp_path / str(number)))
        if shape.checkpoint_format == 2 and not _runs_in_format_2(life):
            with pytest.raises(UnsupportedSparkError, match="format v2 of state in one partition"):
                rewrite_state(spark, life.late, copy, shape=shape)
            assert not copy.exists()
            continue
        rewrite_state(spark, life.late, copy, shape=shape)
        rewritten = reader_of(spark, copy)
        assert all(state.is_empty and state.note is None for state in compared(late, rewritten)), shape
        assert [state.counts for state in compared(early, rewritten)] == changes, shape


def _runs_in_format_2(life: Life) -> bool:
    is_in_one = life.query.build in IN_ONE_PARTITION
    return not is_in_one or installed_release().has(Feature.CHECKPOINT_FORMAT_2_OF_ONE_PARTITION)


def other_shapes(live: LiveDirectory) -> list[StateShape]:
    """Other numbers of partitions and, where it is possible, the other format or provider."""
    stored = stored_state(live)
    assert stored is not None
    was = stored.shape
    is_v1 = was.provider == ROCKSDB and was.checkpoint_format == 1
    wanted = [replace(was, partitions=5), StateShape(ROCKSDB, 4, 2 if is_v1 else 1)]
    return [shape for shape in wanted if possible(stored, shape)]


def possible(stored: StoredState, shape: StateShape) -> bool:
    try:
        check_rewrite(stored, shape)
    except StateRewriteError:
        return False
    return True


def content(frame: StateFrame) -> Counter[str]:
    return Counter(repr(tuple(row)) for row in frame.content.collect())


def applied(state: StateDifference, before: StateFrame) -> Counter[str]:
    """The rows of a state with the differences applied to them."""
    rows = content(before)
    for row in state.rows.collect():
        if row.change != Change.ADDED:
            rows[_row(row, row.before)] -= row.rows
        if row.change != Change.REMOVED:
            rows[_row(row, row.after)] += row.rows
    assert min(rows.values()) >= 0
    return +rows


def _row(difference: Row, value: Any) -> str:
    keys = [difference[name] for name in ("key", "map_key") if name in difference]
    return repr((*keys, value))


@needs(Feature.STATE_READER)
def test_a_state_is_selected_by_its_operator_and_its_name(spark: SparkSession, tmp_path: Path) -> None:
    directory = LiveDirectory(str(tmp_path / "live"))
    run_to_the_end(spark, Workload(counts_over_a_join, HEAP, tmp_path), directory, files_per_batch=4)
    reader = reader_of(spark, directory)

    assert [(each.operator, each.state) for each in reader.states] == [
        ("stateStoreSave", "default"),
        ("symmetricHashJoin", "left"),
        ("symmetricHashJoin", "right"),
    ]
    assert [each.state for each in reader.select(1)] == ["left", "right"]
    assert [each.state for each in reader.select("stateStoreSave")] == ["default"]
    assert [each.operator_id for each in reader.select(state="right")] == [1]
    with pytest.raises(OptionError, match=r"operator 1 and state 'middle'. It has: default of operator 0"):
        reader.select(1, "middle")

    for path in (tmp_path / "live/state/0/0").glob("*.[ds]*"):
        path.unlink()
    with pytest.raises(LiveDirectoryError, match=r"default of operator 0 \(stateStoreSave\)"):
        reader.count()


@pytest.mark.core
def test_a_query_without_state_has_none_to_read(spark: SparkSession, tmp_path: Path) -> None:
    directory = LiveDirectory(str(tmp_path / "live"))
    run_to_the_end(spark, Workload(stateless, HEAP, tmp_path), directory, files_per_batch=8)

    assert reader_of(spark, directory).states == ()


def test_a_spark_without_a_reader_is_refused_by_name() -> None:
    old: Any = SimpleNamespace(version="3.5.6")
    with pytest.raises(UnsupportedSparkError, match=r"Spark 3\.5 does not have: Spark 4\.0 is the oldest"):
        require_state_reader(old)


def test_values_that_spark_cannot_compare_are_compared(spark: SparkSession) -> None:
    """Maps by their entries, in any order; also within structs and arrays."""
    one, other, third = "map('a', 1, 'b', 2)", "map('b', 2, 'a', 1)", "map('a', 1, 'b', 3)"
    made = {name: f"named_struct('m', array({value}))" for name, value in zip("abc", (one, other, third), strict=True)}
    made["d"] = "CAST(NULL AS STRUCT<m: ARRAY<MAP<STRING, INT>>>)"
    frame = spark.sql("SELECT " + ", ".join(f"{value} AS {name}" for name, value in made.items()))
    columns = {each.name: comparable(F.col(each.name), each.dataType) for each in frame.schema.fields}
    equal = frame.select(*(columns["a"].eqNullSafe(columns[other]) for other in "abcd")).first()
    assert tuple(equal or ()) == (True, True, False, False)
