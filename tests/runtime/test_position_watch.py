"""How often a live directory is looked at by a loop that asks four times a second."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.runtime.batch_progress import LOOK_AGAIN_MS, BatchLog, PositionWatch
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory, Positions
from dagster_ckpt.spark.query.query import QueryProgress


@dataclass
class Scene:
    """A live directory whose looks are counted, a log of batches, and a clock."""

    live: LiveDirectory
    log: BatchLog = field(default_factory=BatchLog)
    now_ms: int = 0
    looks: int = 0

    def plan(self, batch: int) -> None:
        self.live.folder.place(f"offsets/{batch}", [b"v1"])

    def commit(self, batch: int) -> None:
        self.live.folder.place(f"commits/{batch}", [b"v1"])

    def report(self, batch: int) -> None:
        self.log.note([QueryProgress(batch, "run", "2026-01-01T00:00:00Z", 1, 0, None, (), 1, True, (), None)])

    def watch(self) -> PositionWatch:
        return PositionWatch(self.live, self.log, lambda: self.now_ms)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Scene]:
    def made(url: str) -> Scene:
        scene = Scene(LiveDirectory(url))
        positions = LiveDirectory.positions

        def counted(live: LiveDirectory) -> Positions:
            scene.looks += 1
            return positions(live)

        monkeypatch.setattr(LiveDirectory, "positions", counted)
        return scene

    return made


@pytest.fixture
def remote(at: Callable[[str], Scene]) -> Scene:
    return at(f"memory://{uuid.uuid4().hex}/live-1")


def test_on_this_machine_every_question_is_a_look(at: Callable[[str], Scene], tmp_path: Path) -> None:
    scene = at(f"file://{tmp_path}/live-1")
    watch = scene.watch()
    assert watch.latest() == Positions(None, None)
    scene.plan(0)
    assert watch.latest() == Positions(None, 0)
    scene.commit(0)
    assert watch.latest() == Positions(0, 0)
    assert scene.looks == 3


def test_in_object_storage_nothing_is_listed_again_until_a_batch_is_reported(remote: Scene) -> None:
    watch = remote.watch()
    remote.plan(0)
    for remote.now_ms in range(0, LOOK_AGAIN_MS, 250):
        assert watch.latest() == Positions(None, 0)
    assert remote.looks == 1
    remote.commit(0)
    remote.report(0)
    assert watch.latest() == Positions(0, 0)
    assert watch.latest() == Positions(0, 0)
    assert remote.looks == 2


def test_what_spark_does_not_report_is_seen_after_a_while(remote: Scene) -> None:
    watch = remote.watch()
    watch.latest()
    remote.plan(0)
    remote.now_ms = LOOK_AGAIN_MS - 1
    assert watch.latest() == Positions(None, None)
    remote.now_ms = LOOK_AGAIN_MS
    assert watch.latest() == Positions(None, 0)


def test_an_attempt_begins_with_a_look_of_its_own(remote: Scene) -> None:
    watch = remote.watch()
    watch.latest()
    remote.commit(0)
    assert watch.look() == Positions(0, None)
    assert watch.latest() == Positions(0, None)
    assert remote.looks == 2


def test_a_report_that_comes_during_a_look_is_not_lost(remote: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, positions = remote.watch(), LiveDirectory.positions

    def overtaken(live: LiveDirectory) -> Positions:
        found = positions(live)
        remote.commit(0)
        remote.report(0)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(LiveDirectory, "positions", overtaken)
        assert watch.latest() == Positions(None, None)
    assert watch.latest() == Positions(0, None)


def test_after_a_failed_look_the_next_question_is_a_look(remote: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = remote.watch()
    watch.latest()
    remote.commit(0)
    remote.report(0)

    def away(_live: LiveDirectory) -> Positions:
        raise StorageAccessError("the bucket is away")

    with monkeypatch.context() as patch:
        patch.setattr(LiveDirectory, "positions", away)
        with pytest.raises(StorageAccessError):
            watch.latest()
    assert watch.latest() == Positions(0, None)
