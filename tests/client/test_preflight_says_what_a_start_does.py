"""Preflight passes or refuses the output of new code exactly where a start of it does, and in the same words."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dagster_ckpt.catalog.pending_restore import Emptied, ToBatch
from dagster_ckpt.catalog.records import StartCause
from dagster_ckpt.client import preflight as preflights
from dagster_ckpt.client.preflight import preflight
from dagster_ckpt.errors import CkptError
from dagster_ckpt.recovery.fork import fork
from dagster_ckpt.runtime import start as starting
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import RunRequest
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.spark.query.trial_batch import Trial
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.start_from import StartFrom
from tests.support import verbs
from tests.support.as_writer import as_writer
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History

STRANGERS = 'v1\n{"path":"file:///strangers","action":"add"}'


class Scene:
    """A stream with a past, and what its next start meets; each method makes another situation."""

    def __init__(self, root: Path) -> None:
        self.history = History(root)
        self.stream: StreamHandle = replace(self.history.shelf.stream, code_version="2")
        self.folder: Path = self.history.sink
        self.new = root / "new"

    def lay_log(self, folder: Path, text: str, *batches: int) -> None:
        shutil.rmtree(folder / "_spark_metadata", ignore_errors=True)
        (folder / "_spark_metadata").mkdir(parents=True)
        for batch in batches:
            (folder / "_spark_metadata" / str(batch)).write_text(text)

    def moved(self, text: str | None = None, *batches: int) -> None:
        self.folder = self.new
        if text is not None:
            self.lay_log(self.new, text, *batches)

    def taken_over(self) -> None:
        self.lay_log(self.folder, STRANGERS, *range(LAST + 1))

    def log_gone(self) -> None:
        shutil.rmtree(self.folder / "_spark_metadata")

    def log_behind(self) -> None:
        (self.folder / "_spark_metadata/8").unlink()

    def log_ahead(self, batches: int) -> None:
        for batch in range(LAST - batches + 1, LAST + 1):
            for log in ("offsets", "commits"):
                (self.history.shelf.live / log / str(batch)).unlink()

    def batch_in_flight(self) -> None:
        (self.history.shelf.live / f"commits/{LAST}").unlink()

    def another_stream_writes(self) -> None:
        self.moved("v1", LAST)
        other = replace(self.stream, stream_id="other", name="other", asset_key="other")
        other.register()
        holder = this_holder("its", "run", None)
        writer = as_writer(other.catalog, "other")
        writer.executions.start("its", run_id="run", cause=StartCause.MANUAL, holder=holder)
        writer.executions.heartbeat("its", {"sinks": [f"FileSink[{self.new}]"]})

    def lost(self) -> None:
        verbs.trigger_savepoint(self.stream, origin="a test")
        live = self.history.live.url
        as_writer(self.stream.catalog, STREAM).executions.running("first", live_directory=live, recovery={})
        shutil.rmtree(self.history.shelf.live)

    def cut_off(self, batch_id: int | None) -> None:
        """A start was killed after it had switched to what it made."""
        live = self.history.shelf.live
        made = live.with_name("live-2-1")
        shutil.copytree(live, made)
        for batch in range(4, LAST + 1):
            for log in ("offsets", "commits"):
                (made / log / str(batch)).unlink()
        sinks = (f"FileSink[file:{self.history.sink}]",)
        pending = Emptied(sinks=sinks) if batch_id is None else ToBatch(batch_id=batch_id, sinks=sinks)
        as_writer(self.stream.catalog, STREAM).streams.switch_live_directory(str(made), pending_restore=pending)

    def forked(self, outputs: dict[str, str] | None = None) -> None:
        original, self.stream = (
            self.stream,
            replace(self.stream, stream_id="scratch", name="scratch", asset_key="scratch"),
        )
        fork(original, self.stream, StartFrom("batch-5"), origin="a test", outputs=outputs)
        self.folder = self.new

    def then(self, *steps: Callable[[], None]) -> None:
        for step in steps:
            step()


SITUATIONS: dict[str, tuple[bool, Callable[[Scene], None]]] = {
    "as it was": (True, lambda scene: None),
    "a batch in flight": (True, lambda scene: scene.batch_in_flight()),
    "a new folder": (True, lambda scene: scene.moved()),
    "a folder that was given half a log": (True, lambda scene: scene.moved("v1", 0, 1, 2)),
    "a stranger's folder": (False, lambda scene: scene.moved(STRANGERS, *range(LAST + 1))),
    "another stream's folder": (False, lambda scene: scene.another_stream_writes()),
    "the log is gone": (False, lambda scene: scene.log_gone()),
    "the log is behind": (False, lambda scene: scene.log_behind()),
    "the log is ahead": (False, lambda scene: scene.log_ahead(3)),
    "restored": (True, lambda scene: scene.lost()),
    "restored, in a new folder": (True, lambda scene: scene.then(scene.lost, scene.moved)),
    "restored, in a folder that the snapshot does not know": (
        False,
        lambda scene: scene.then(scene.lost, lambda: scene.moved(STRANGERS, 0)),
    ),
    "restored, a stranger took its folder over": (False, lambda scene: scene.then(scene.lost, scene.taken_over)),
    "a rewind was cut off": (True, lambda scene: scene.cut_off(3)),
    "a rewind was cut off, in a new folder": (
        True,
        lambda scene: scene.then(lambda: scene.cut_off(3), scene.moved),
    ),
    "a rewind was cut off, in a stranger's": (
        False,
        lambda scene: scene.then(lambda: scene.cut_off(3), lambda: scene.moved(STRANGERS, 3)),
    ),
    "an empty start was cut off, in a stranger's": (
        False,
        lambda scene: scene.then(lambda: scene.cut_off(None), lambda: scene.moved(STRANGERS, 0)),
    ),
    "a fork": (True, lambda scene: scene.forked()),
    "a fork with the rows of the original": (
        True,
        lambda scene: scene.forked({str(scene.history.sink): str(scene.new)}),
    ),
    "a fork where the original writes": (
        False,
        lambda scene: scene.then(scene.forked, lambda: setattr(scene, "folder", scene.history.sink)),
    ),
    "a fork in a stranger's folder": (
        False,
        lambda scene: scene.then(scene.forked, lambda: scene.moved(STRANGERS, 5)),
    ),
}


class QueryStartedError(Exception):
    """Spark is given the query."""


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    for module in (preflights, starting):
        monkeypatch.setattr(module, "named_output", lambda _: NamedOutput("parquet", str(scene.folder)))
        monkeypatch.setattr(module, "plan_of_writer", lambda _: None)
    monkeypatch.setattr(preflights, "run_trial", lambda *_, **__: Trial(1))
    yield scene
    scene.history.close()


@pytest.mark.parametrize(("may_start", "situation"), SITUATIONS.values(), ids=SITUATIONS)
def test_it_says_what_the_start_then_does(scene: Scene, may_start: bool, situation: Callable[[Scene], None]) -> None:
    def start_query(live: LiveDirectory) -> None:
        raise QueryStartedError

    situation(scene)
    files = {path: path.read_bytes() for path in scene.history.shelf.root.rglob("*") if path.is_file()}

    told = preflight(scene.stream, lambda: None)  # type: ignore[arg-type, return-value]
    after = {path: path.read_bytes() for path in files if path.suffix != ".db"}
    with pytest.raises((QueryStartedError, CkptError)) as end:
        execute_stream(scene.stream, RunRequest("run", start_query, describe=lambda: None))  # type: ignore[arg-type, return-value]

    assert after == {path: data for path, data in files.items() if path.suffix != ".db"}
    assert (told.passed, isinstance(end.value, QueryStartedError)) == (may_start, may_start), (told.reason, end.value)
    if not may_start:
        assert str(end.value) in told.reason or told.reason.removeprefix("the new code failed: ") in str(end.value)
