"""What a start does about a damaged log of its sink, and an older copy of its live directory, without Spark."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dagster_ckpt.errors import SharedSinkError
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.stream.start_from import StartFrom
from tests.support import verbs
from tests.support.file_damage import cut
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History

ORIGIN = "a test"


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    """It has a savepoint after batch 8, and has run on to batch 11."""
    made = History(tmp_path)
    made.sinks(made.file_sink)
    verbs.trigger_savepoint(made.shelf.stream, origin=ORIGIN, label="sp")
    for batch in range(LAST + 1, LAST + 4):
        made.commit(batch)
    yield made
    made.close()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a compact entry is gone": lambda log: (log / "11.compact").unlink(),
    "an entry is cut": lambda log: cut(log / "11.compact"),
    "everything is gone": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_log_is_written_back_from_the_snapshot(history: History, damage: str) -> None:
    DAMAGES[damage](history.sink / "_spark_metadata")

    plan = verbs.planned_start(history.shelf.stream, StartFrom())
    assert (plan.kind, plan.to_batch) == (RecoveryKind.RESTORE, LAST)
    assert "the log of" in plan.reason
    history.start()

    assert (history.batch, history.sink_batch) == (LAST, LAST)
    assert history.unlike_uninterrupted() == []
    assert verbs.planned_start(history.shelf.stream, StartFrom()).kind is not RecoveryKind.RESTORE


def test_a_snapshot_without_the_log_is_passed_over(history: History) -> None:
    """It would begin a new log, and the rows before it would be gone."""
    stream = history.shelf.stream
    other = History(history.shelf.root / "other")
    history.sinks(other.file_sink)
    verbs.trigger_savepoint(stream, origin=ORIGIN, label="elsewhere")
    history.sinks(history.file_sink)
    other.close()
    (history.sink / "_spark_metadata/11.compact").unlink()

    plan = verbs.planned_start(stream, StartFrom())

    assert plan.snapshot is not None
    assert plan.snapshot.label == "sp"
    assert ["has not captured the log" in each.why for each in plan.passed] == [True]


def test_a_damaged_log_that_no_snapshot_has_is_refused(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.sinks(history.file_sink)
    shutil.rmtree(history.sink / "_spark_metadata")

    assert verbs.planned_start(history.shelf.stream, StartFrom()).kind is not RecoveryKind.RESTORE
    with pytest.raises(SharedSinkError, match="rebuild-output"):
        history.start()
    history.close()


def test_files_that_the_log_must_list_are_there_before_it_is_written_back(history: History) -> None:
    shutil.rmtree(history.sink / "_spark_metadata")
    (history.sink / "part-2").unlink()

    preview = verbs.start_preview(history.shelf.stream, StartFrom())

    assert ["part-2" in each.reason for each in preview.losing] == [True]


def test_an_older_copy_of_the_live_directory_is_damage(history: History, tmp_path: Path) -> None:
    stream, live = history.shelf.stream, history.shelf.live
    shutil.copytree(live, tmp_path / "backup")
    history.commit(LAST + 4)
    savepoint = verbs.trigger_savepoint(stream, origin=ORIGIN, label="newer")
    assert verbs.planned_start(stream, StartFrom()).kind is not RecoveryKind.RESTORE
    shutil.rmtree(live)
    shutil.copytree(tmp_path / "backup", live)

    plan = verbs.planned_start(stream, StartFrom())

    assert plan.snapshot is not None
    assert plan.snapshot.snapshot_id == savepoint.snapshot_id
    assert "older copy" in plan.reason
    # A start from an older snapshot leaves that timeline: its new directory is at an earlier batch on purpose.
    history.start("sp")
    assert history.batch == LAST
    assert stream.catalog.streams.get(STREAM).live_directory != str(live)
    assert verbs.planned_start(stream, StartFrom()).kind is not RecoveryKind.RESTORE
