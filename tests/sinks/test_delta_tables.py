"""Real Delta tables: a stream that goes back, is killed or loses its directory shows each row once."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagster_ckpt.sinks.delta_roll_back import ROLL_BACK_ID
from dagster_ckpt.spark.versions import TableFormat
from tests.support.shop_tables import PLAY_S, Plays, play
from tests.support.table_jars import fetch_jars, needs_jar

SHOWN = {
    "lost directory": range(6),
    "replayed": range(7),
    "back and forth": range(5),
    "from nothing": range(3),
    "killed after the restore": range(3),
    "in flight, its state is there": range(4),
    "in flight, its state is missing": range(4),
    "optimized": range(3),
    "paused in its roll-back": range(5),
}
# What fences a holder of the lease before, and what a batch is compared with: `test_iceberg_tables.py`.
QUICK = ("lost directory", "killed after the restore", "others wrote")

pytestmark = [pytest.mark.spark, pytest.mark.timeout(PLAY_S), needs_jar(TableFormat.DELTA)]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Plays:
    """What each scenario of the program has left in its table."""
    folder = tmp_path_factory.mktemp("delta")
    fetch_jars(TableFormat.DELTA, folder / "jars")
    return Plays("tests.sinks.delta_program", folder, QUICK)


@pytest.mark.thorough(but=("lost directory", "killed after the restore"))
@pytest.mark.parametrize("scenario", SHOWN)
def test_a_stream_into_a_delta_table_shows_each_row_once_wherever_it_goes_back_to(told: Plays, scenario: str) -> None:
    assert (told[scenario]["rows"], told[scenario]["refused"]) == (list(SHOWN[scenario]), None)


def test_a_restore_that_was_cut_off_is_not_repeated(told: Plays) -> None:
    assert told["killed after the restore"]["operations"].count("RESTORE") == 1


def test_rows_of_others_are_not_undone(told: Plays) -> None:
    shown = told["others wrote"]

    assert "others have written versions 3 since" in shown["refused"]
    assert "RESTORE TABLE delta.`" in shown["refused"]
    assert (shown["rows"], "RESTORE" in shown["operations"]) == ([0, 1, 2, 100], False)


@pytest.mark.thorough
def test_the_preview_names_files_that_vacuum_deleted_and_the_start_is_refused(told: Plays) -> None:
    shown = told["optimized and vacuumed"]
    effect, refused = shown["ended"]

    assert effect == "IRREVERSIBLE"
    assert "1 files that this version needs were deleted since (VACUUM), such as part-" in refused
    assert (shown["rows"], "RESTORE" in shown["operations"]) == ([0, 1, 1, 2, 2], False)


@pytest.mark.thorough
def test_a_roll_back_that_was_paused_undoes_nothing_of_a_successor(told: Plays) -> None:
    """RESTORE read the newest version after the pause, and undid the batches that the successor had committed."""
    shown = told["paused in its roll-back"]

    assert [each.rpartition(": ")[2] for each in shown["ended"]] == ["LeaseLostError"] * 5
    assert "RESTORE" not in shown["operations"]


@pytest.mark.thorough
def test_a_batch_that_only_a_checkpoint_of_the_log_names_is_known(told: Plays) -> None:
    assert told["in a checkpoint"]["ended"] == ["1", "None"]


@pytest.mark.thorough
def test_a_restore_has_the_actions_of_sql(told: Plays) -> None:
    compared = [line for name, line in told().items() if name.startswith("version")]

    assert len(compared) > 5
    for line in compared:
        mark = [action for action in line["by_package"]["actions"] if ROLL_BACK_ID in action]
        assert len(mark) == 1
        line["by_package"]["actions"].remove(*mark)
        assert line["by_package"] == line["by_sql"], line["scenario"]


@pytest.mark.thorough
def test_a_version_whose_files_were_deleted_is_not_restored(told: Plays) -> None:
    shown = told["vacuumed"]

    assert "1 of its data files were deleted since" in shown["refused"]
    assert not shown["is_changed"]


@pytest.mark.thorough
def test_a_table_is_not_rolled_back_where_the_lost_batches_are_replayed(told: Plays) -> None:
    # Once, when the stream went back before. An empty version fences a former holder of the lease.
    assert [each for each in told["replayed"]["operations"] if each != "STREAMING UPDATE"] == [
        "RESTORE",
        "Manual Update",
    ]
    assert "RESTORE" in told["lost directory"]["operations"]


@pytest.mark.thorough
def test_a_batch_is_compared_with_its_version(told: Plays) -> None:
    assert (told["debugged"]["rows"], told["debugged"]["refused"]) == ([0, 1, 2], None)


@pytest.mark.thorough
def test_a_table_has_each_row_once_of_old_code_up_to_the_hand_over_and_of_new_code_after_it(tmp_path: Path) -> None:
    fetch_jars(TableFormat.DELTA, tmp_path / "jars")
    shown = play("tests.sinks.handed_over_program", tmp_path / "streams", tmp_path / "jars")["handed over"]

    assert shown["boundary"] >= 2
    assert "rows of output, the same state" in shown["compared"]
