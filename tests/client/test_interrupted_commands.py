"""A command that is killed, or ended by a signal, at any of its steps: repeated, it ends as if it had run through.

Fork, import, rewrite and roll-back have tests of the same kind beside their other tests.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.pending_restore import Adopting
from dagster_ckpt.catalog.records import SnapshotStatus
from dagster_ckpt.catalog.snapshots import SnapshotRecords
from dagster_ckpt.catalog.streams import StreamRecords
from dagster_ckpt.client.export import export_snapshot
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.client.rebuild import rebuild
from dagster_ckpt.errors import LiveDirectoryError, RequestFailedError, RestoreError
from dagster_ckpt.recovery.adopt import undo_adoption
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.spark.checkpoint_dir.layout import NOT_IN_USE
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.ownership import OWNER
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import SnapshotKind
from tests.recovery.test_adopt import Outside, tree
from tests.support.executioner import CHANGES, Executioner, Killed
from tests.support.retention_shelf import STREAM, Shelf
from tests.support.rewind_history import LAST, History
from tests.support.taken_snapshot import taken
from tests.support.thorough import either
from tests.support.verbs import promote_checkpoint

STEPS: tuple[tuple[Any, str], ...] = (
    *CHANGES,
    (SnapshotRecords, "start"),
    (SnapshotRecords, "complete"),
    (SnapshotRecords, "mark_deleting"),
    (SnapshotRecords, "deleted"),
    (StreamRecords, "note_pending"),
    (StreamRecords, "forget_adoption"),
)
SIGNALS = [None, SystemExit]


@dataclass
class Attempt:
    """One interrupted command: at which step, and whether it was."""

    step: int
    interrupted: bool = False


@contextmanager
def interrupted_at(step: int, signal: type[BaseException] | None) -> Iterator[Attempt]:
    attempt = Attempt(step)
    with pytest.MonkeyPatch.context() as patch:
        Executioner(patch, step, *STEPS, signal=signal)
        try:
            yield attempt
        except (Killed, SystemExit):
            attempt.interrupted = True


def at_every_step(
    root: Path, signal: type[BaseException] | None, attempt: Callable[[Path, Callable[[int], Any]], bool]
) -> int:
    """Interrupt a command at each step in a world of its own; returns how many steps it has."""
    step = 0
    while attempt(root / str(step), lambda at=step: interrupted_at(at, signal)):  # type: ignore[misc]
        step += either(quick=4, thorough=1)
    return step


def completed(stream: StreamHandle) -> list[tuple[str | None, int | None]]:
    return [(each.label, each.batch_id) for each in stream.catalog.snapshots.completed(STREAM)]


@pytest.mark.thorough(but="None")
@pytest.mark.parametrize("signal", SIGNALS)
def test_an_adoption(tmp_path: Path, signal: type[BaseException] | None) -> None:
    def attempt(root: Path, interrupted: Callable[[], Any]) -> bool:
        root.mkdir()
        outside = Outside.below(root)
        before = tree(outside.directory), tree(outside.sink)
        with interrupted() as made:
            outside.adopt(label="first")
        outside.commit(LAST + 1)
        now = tree(outside.directory), tree(outside.sink)
        stream = outside.stream
        pending = stream.catalog.streams.get(STREAM).pending_restore if stream.catalog.streams.all() else None
        if isinstance(pending, Adopting):
            for point in ("latest", "first", "empty"):
                with pytest.raises(LiveDirectoryError, match=r"begun and not finished.*--undo"):
                    outside.start(point)
        elif made.interrupted and stream.catalog.streams.all():
            # Nothing of it is left: no snapshot from which a start would roll back the sink of the query.
            assert completed(stream) == []
        assert (tree(outside.directory), tree(outside.sink)) == now
        assert before[0].items() <= now[0].items()

        outside.adopt(label="first")

        [newest, *older] = completed(stream)
        assert (newest, older) == (("first", LAST + 1), [] if made.interrupted else [("first", LAST)])
        plan, _ = outside.start()
        assert (plan.kind, plan.to_batch) == (RecoveryKind.CLONE, LAST + 1)
        assert not stream.catalog.snapshots.of_stream(STREAM, status=SnapshotStatus.IN_PROGRESS)
        assert (outside.sink / "_spark_metadata" / str(LAST + 1)).exists()
        outside.close()
        return made.interrupted

    assert at_every_step(tmp_path, signal, attempt) > 6


@pytest.mark.parametrize("signal", SIGNALS)
def test_an_adoption_that_is_dropped(tmp_path: Path, signal: type[BaseException] | None) -> None:
    def attempt(root: Path, interrupted: Callable[[], Any]) -> bool:
        root.mkdir()
        outside = Outside.below(root)
        stream = outside.stream
        outside.adopt(label="first")
        before = tree(outside.directory), tree(outside.sink)
        with interrupted() as made:
            undo_adoption(stream, origin="a test")
        if made.interrupted:
            plan = None
            try:
                plan = planned_start(stream, StartFrom())
            except LiveDirectoryError:
                assert isinstance(stream.catalog.streams.get(STREAM).pending_restore, Adopting)
            # Before the first step the adoption stands.
            assert plan is None or plan.kind is RecoveryKind.CLONE
            undo_adoption(stream, origin="a test")
        assert completed(stream) == []
        assert planned_start(stream, StartFrom()).kind is RecoveryKind.START_EMPTY
        with pytest.raises(RequestFailedError, match="has no adoption to drop"):
            undo_adoption(stream, origin="a test")
        assert (tree(outside.directory), tree(outside.sink)) == before
        # As new: also for another directory.
        shutil.copytree(outside.directory, root / "other")
        moved = Outside(outside.root, outside.history, stream)
        shutil.rmtree(outside.directory)
        shutil.move(root / "other", outside.directory)
        moved.adopt()
        assert moved.start()[0].kind is RecoveryKind.CLONE
        outside.close()
        return made.interrupted

    assert at_every_step(tmp_path, signal, attempt) > 3


@pytest.mark.parametrize("signal", SIGNALS)
def test_a_promotion(tmp_path: Path, signal: type[BaseException] | None) -> None:
    def attempt(root: Path, interrupted: Callable[[], Any]) -> bool:
        root.mkdir()
        history = History(root)
        stream = history.shelf.stream
        point = taken(history.shelf, SnapshotKind.CHECKPOINT)
        with interrupted() as made:
            promote_checkpoint(stream, f"chk-{point.number}", label="kept")
        begun = stream.catalog.snapshots.of_stream(STREAM, status=SnapshotStatus.IN_PROGRESS)
        if signal is not None:
            # Whoever ends in order leaves nothing that looks as if it were under way, and no bytes.
            assert begun == []
            listed = {each.location for each in stream.catalog.snapshots.completed(STREAM)}
            assert set(stream.store.savepoints()) <= listed
        plan = planned_start(stream, StartFrom())
        assert (plan.kind, plan.to_batch) == (RecoveryKind.RESUME, LAST)

        again = promote_checkpoint(stream, f"chk-{point.number}", label="kept")

        assert stream.store.verify(again.location or "", deep=True) == []
        assert planned_start(stream, StartFrom(again.snapshot_id)).to_batch == LAST
        history.close()
        return made.interrupted

    assert at_every_step(tmp_path, signal, attempt) > 3


@pytest.mark.thorough(but="SystemExit")
@pytest.mark.parametrize("signal", SIGNALS)
def test_an_export(tmp_path: Path, signal: type[BaseException] | None) -> None:
    def attempt(root: Path, interrupted: Callable[[], Any]) -> bool:
        root.mkdir()
        history = History(root)
        stream = history.shelf.stream
        point = taken(history.shelf, SnapshotKind.CHECKPOINT)
        name, to, rows = f"chk-{point.number}", str(root / "exported"), {str(history.sink): str(root / "rows")}
        with interrupted() as made:
            export_snapshot(stream, name, to, outputs=rows)
        if not made.interrupted:
            with pytest.raises(RestoreError, match="exists already"):
                export_snapshot(stream, name, to, outputs=rows)
        else:
            export_snapshot(stream, name, to, outputs=rows)
        export_snapshot(stream, name, f"{to}-2", outputs={str(history.sink): f"{root / 'rows'}-2"})
        assert tree(root / "exported") == tree(root / "exported-2")
        assert tree(root / "rows").keys() == tree(root / "rows-2").keys()
        assert not (root / "exported.partial").exists()
        history.close()
        return made.interrupted

    assert at_every_step(tmp_path, signal, attempt) > 10


def test_an_export_replaces_no_directory_of_a_deployment(tmp_path: Path) -> None:
    """A fork that was not started yet carries the same mark as what an interrupted export leaves."""
    history = History(tmp_path / "a")
    point = taken(history.shelf, SnapshotKind.CHECKPOINT)
    live = tmp_path / "live/orders"
    (live / "1").mkdir(parents=True)
    (live / "1" / NOT_IN_USE).write_text("")
    (live / OWNER).write_text("another")
    with pytest.raises(RestoreError, match="exists already"):
        export_snapshot(history.shelf.stream, f"chk-{point.number}", str(live / "1"))
    history.close()


def test_a_rebuild_does_not_go_back_to_the_snapshot_of_an_adoption(tmp_path: Path) -> None:
    """The catalog is lost before the first start: nothing but that snapshot would remember the query that runs."""
    outside = Outside.below(tmp_path)
    outside.adopt(label="first")
    lost = outside.stream.catalog.deployment_id
    outside.stream.catalog.close()
    (tmp_path / "ours/catalog.db").unlink()
    new = Outside(outside.root, outside.history, Shelf.reopened(tmp_path / "ours").stream)
    before = tree(new.directory), tree(new.sink)

    report = rebuild(new.stream, origin="a test", take_over_deployment=lost)

    assert any("adopt it again" in each for each in report.skipped), report
    assert completed(new.stream) == []
    assert (tree(new.directory), tree(new.sink)) == before
    # The advice of the report.
    new.adopt()
    assert new.start()[0].kind is RecoveryKind.CLONE
    new.close()
