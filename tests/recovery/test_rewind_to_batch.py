"""Going back to a batch in the live directory itself: cut off at any step, it is done or not done at the next start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dagster_ckpt.errors import LiveDirectoryError, SharedSinkError, SinkRollbackError
from dagster_ckpt.recovery.plan import RecoveryKind
from tests.support.executioner import Executioner, Killed
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History
from tests.support.thorough import either


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path)
    yield history
    history.close()


@pytest.mark.parametrize("batch", [0, 2, 3, 4, 7, LAST])
def test_directory_and_sink_stand_at_the_batch_and_the_old_directory_as_it_was(history: History, batch: int) -> None:
    before = {path: path.read_bytes() for path in history.shelf.live.rglob("*") if path.is_file()}
    timeline = history.shelf.stream.catalog.streams.get(STREAM).timeline

    kind, prepared = history.start(f"batch-{batch}")

    assert kind is RecoveryKind.REWIND
    assert (history.batch, history.sink_batch) == (batch, batch)
    assert prepared.rolled_back == (f"file:{history.sink}",)
    assert prepared.may_repeat == ("ForeachBatchSink",)
    assert history.query_id == "11111111-2222"
    assert history.shelf.stream.catalog.streams.get(STREAM).timeline == timeline + 1
    assert {path: path.read_bytes() for path in history.shelf.live.rglob("*") if path.is_file()} == before
    assert history.start()[0] is RecoveryKind.RESUME


def test_a_new_query_id_does_not_reach_the_old_directory(history: History) -> None:
    history.start("batch-3", new_query_id=True)

    assert history.query_id != "11111111-2222"
    assert "11111111-2222" in (history.shelf.live / "metadata").read_text()


def test_snapshots_before_the_batch_belong_to_the_new_timeline_too(history: History) -> None:
    snapshots = [history.shelf.checkpoint() for _ in range(5)]
    assert [snapshot.batch_id for snapshot in snapshots] == [1, 2, 3, 4, 5]

    history.start("batch-3")

    restorable = history.shelf.stream.catalog.snapshots.restorable(STREAM)
    assert [snapshot.batch_id for snapshot in restorable] == [3, 2, 1]


def test_where_the_sinks_are_not_known_nothing_is_changed(history: History) -> None:
    history.sinks()

    with pytest.raises(SinkRollbackError, match="does not know yet which sinks"):
        history.start("batch-3")

    assert (history.batch, history.sink_batch) == (LAST, LAST)


def test_a_sink_whose_log_does_not_reach_back_is_refused_before_anything_is_changed(history: History) -> None:
    for name in ("0", "1", "2", "3.compact"):
        (history.sink / "_spark_metadata" / name).unlink()

    with pytest.raises(SinkRollbackError, match=r"begins with entry 4.*Go back to a snapshot"):
        history.start("batch-5")

    assert (history.batch, history.sink_batch) == (LAST, LAST)
    assert history.start()[0] is RecoveryKind.RESUME


def test_a_hole_in_the_log_after_the_batch_is_removed_with_what_follows_it(history: History) -> None:
    """As the power leaves a roll-back: of the entries that it removed, some are back."""
    log = history.sink / "_spark_metadata"
    (log / "7.compact").unlink()

    assert history.start("batch-5")[0] is RecoveryKind.REWIND
    assert (history.batch, history.sink_batch) == (5, 5)
    assert sorted(path.name for path in log.iterdir() if path.name[0].isdigit())[-2:] == ["4", "5"]


def test_a_hole_in_the_log_before_the_batch_is_refused(history: History) -> None:
    log = history.sink / "_spark_metadata"
    for name in ("4", "7.compact"):
        (log / name).unlink()

    with pytest.raises(SharedSinkError, match=r"nothing was changed.*lacks an entry"):
        history.start("batch-5")

    assert history.batch == LAST


def test_a_batch_that_is_not_whole_is_refused_and_leaves_nothing(history: History) -> None:
    (history.shelf.live / "sources/0/2").unlink()

    with pytest.raises(LiveDirectoryError, match="sources/0/2 is missing"):
        history.start("batch-2")

    assert [path.name for path in history.shelf.live.parent.iterdir() if path.is_dir()] == ["live-1-0"]


def test_killed_at_any_step_the_next_start_goes_on_from_the_old_place_or_from_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = set()
    step = 0
    killed = True
    while killed:
        (tmp_path / str(step)).mkdir()
        history = History(tmp_path / str(step))
        with monkeypatch.context() as patch:
            Executioner(patch, step)
            try:
                history.start("batch-3", new_query_id=True)
                killed = False
            except Killed:
                step += either(quick=3, thorough=1)
        kind, prepared = history.start()
        assert prepared.live.url == history.live.url
        assert (history.batch, history.sink_batch) in ((LAST, LAST), (3, 3)), f"killed at step {step}"
        assert (history.query_id == "11111111-2222") is (history.batch == LAST)
        outcomes.add((kind, history.batch))
        assert history.start("batch-3", new_query_id=True)[0] is RecoveryKind.REWIND
        assert (history.batch, history.sink_batch) == (3, 3)
        history.close()
    assert outcomes == {(RecoveryKind.RESUME, LAST), (RecoveryKind.FINISH_RESTORE, 3), (RecoveryKind.RESUME, 3)}
    assert step > 12
