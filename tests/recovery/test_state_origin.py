"""A start never begins without state unasked: what a live directory was made from is remembered, and made again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import OriginKind
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.errors import LiveDirectoryError, StateAtRiskError
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.prepare import prepare
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import RunRequest
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.query import SupervisedQuery
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.as_writer import keeping
from tests.support.retention_shelf import STREAM, Shelf
from tests.support.rewind_history import LAST, History
from tests.support.verbs import request_start, trigger_savepoint

ME = "a test"


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path)
    history.sinks(f"FileSink[file:{history.sink}]")
    yield history
    history.close()


def lose(live: LiveDirectory) -> None:
    shutil.rmtree(live.url.removeprefix("file://"))


def empty(live: LiveDirectory) -> None:
    """What a power failure leaves of names that were not flushed."""
    lose(live)
    Path(live.url.removeprefix("file://")).mkdir()


@pytest.mark.parametrize("how", [lose, empty])
def test_f19_a_rewound_directory_that_is_lost_is_made_again_and_not_empty(history: History, how: Any) -> None:
    history.start("batch-5")
    first = history.live
    how(first)

    kind, prepared = history.start()

    assert kind is RecoveryKind.REWIND
    assert prepared.live != first
    assert (history.batch, history.sink_batch) == (5, 5)
    origin = history.shelf.stream.catalog.streams.get(STREAM).origin
    assert origin is not None
    assert (origin.kind, origin.batch_id) == (OriginKind.DIRECTORY, 5)


def test_f19_it_is_made_again_as_often_as_it_is_lost(history: History) -> None:
    history.start("batch-5")
    for _ in range(3):
        lose(history.live)
        assert history.start()[0] is RecoveryKind.REWIND
        assert (history.batch, history.sink_batch) == (5, 5)


def test_an_adopted_directory_that_is_lost_is_made_again(history: History) -> None:
    stream = history.shelf.stream
    plan = plan_recovery(recovery_facts(stream, StartFrom(), predecessor_ended=False))
    assert plan.kind is RecoveryKind.CLONE
    with keeping(stream.catalog, STREAM) as lease:
        prepare(stream, plan, lease)
    lose(history.live)

    assert history.start()[0] is RecoveryKind.REWIND
    assert (history.batch, history.sink_batch) == (LAST, LAST)


@pytest.mark.parametrize("how", [lose, empty])
def test_f19c_a_directory_restored_from_a_listed_savepoint_is_restored_again(history: History, how: Any) -> None:
    savepoint = trigger_savepoint(history.shelf.stream, origin=ME, label="sp")
    history.start("sp")
    how(history.live)

    plan = planned_start(history.shelf.stream, StartFrom())
    assert (plan.kind, plan.snapshot) == (RecoveryKind.RESTORE, savepoint)
    history.start()
    assert (history.batch, history.sink_batch) == (LAST, LAST)


def elsewhere(history: History, root: Path) -> StreamHandle:
    """The same stream in a new catalog, with storage of its own, and live directories that go with their pod."""
    storage = FileSystemCheckpointStorage(f"file://{root}/snapshots", 64, savepoint_path=f"file://{root}/savepoints")
    stream = replace(
        history.shelf.stream,
        catalog=Catalog(f"sqlite:///{root}/catalog.db"),
        store=open_store(storage, STREAM),
        live_root=str(root / "pod"),
    )
    stream.register()
    return stream


def run(stream: StreamHandle, start_from: str) -> LiveDirectory:
    """A run whose query cannot be started: what it would have been started on."""
    seen: list[LiveDirectory] = []

    def start_query(live: LiveDirectory) -> SupervisedQuery:
        seen.append(live)
        raise RuntimeError("ClassNotFoundException: kafka")

    with pytest.raises(RuntimeError, match="kafka"):
        execute_stream(stream, RunRequest("run", start_query, start_from=StartFrom(start_from)))
    return seen[0]


def test_f19b_a_directory_restored_from_a_location_is_restored_again(history: History, tmp_path: Path) -> None:
    savepoint = trigger_savepoint(history.shelf.stream, origin=ME, label="sp")
    copy = tmp_path / "dr" / "savepoint"
    shutil.copytree((savepoint.location or "").removeprefix("file://"), copy)
    stream = elsewhere(history, tmp_path / "dr")
    stream.catalog.take_over_deployment(history.shelf.stream.catalog.deployment_id)
    first = run(stream, str(copy))
    shutil.rmtree(tmp_path / "dr" / "pod")

    second = run(stream, "latest")

    assert second != first
    assert second.positions().commit == LAST
    assert history.sink_batch == LAST
    stream.catalog.close()


def test_with_the_catalog_lost_a_start_over_what_is_there_is_refused_with_its_list(
    history: History, tmp_path: Path
) -> None:
    snapshot = history.shelf.checkpoint()
    stream = replace(history.shelf.stream, catalog=Catalog(f"sqlite:///{tmp_path / 'another.db'}"))

    def never(_live: LiveDirectory) -> SupervisedQuery:
        raise AssertionError("it was started")

    with pytest.raises(LiveDirectoryError, match="rebuild_catalog") as refused:
        execute_stream(stream, RunRequest("run", never))

    assert f"{history.live.url}, up to batch {LAST}" in str(refused.value)
    assert str(snapshot.location) in str(refused.value)
    assert (history.batch, history.sink_batch) == (LAST, LAST)
    with pytest.raises(StateAtRiskError, match="live-1"):
        planned_start(stream, StartFrom("empty"))
    assert planned_start(stream, StartFrom("empty", discard_state=True)).kind is RecoveryKind.START_EMPTY
    stream.catalog.close()


def test_with_the_catalog_lost_snapshots_alone_are_told_of_too(tmp_path: Path) -> None:
    shelf = Shelf.at(tmp_path)
    snapshot = shelf.checkpoint()
    shelf.break_live_directory("missing")
    stream = replace(shelf.stream, catalog=Catalog(f"sqlite:///{tmp_path / 'another.db'}"))
    stream.register()

    with pytest.raises(LiveDirectoryError, match="rebuild_catalog") as refused:
        planned_start(stream, StartFrom())

    assert str(snapshot.location) in str(refused.value)
    stream.catalog.close()
    shelf.stream.catalog.close()


def test_an_empty_start_is_asked_for_by_name_and_confirmed(history: History) -> None:
    stream = history.shelf.stream
    with pytest.raises(StateAtRiskError, match="after batch 8"):
        history.start("empty")
    with pytest.raises(StateAtRiskError, match="after batch 8"):
        request_start(stream, StartFrom("empty"), origin=ME)
    assert (history.batch, history.sink_batch) == (LAST, LAST)

    asked = request_start(stream, StartFrom("empty", discard_state=True, accept_loss=True), origin=ME)
    assert asked.arguments["discard_state"] is True
    assert history.start("empty", discard_state=True)[0] is RecoveryKind.START_EMPTY
    origin = stream.catalog.streams.get(STREAM).origin
    assert origin is not None
    assert origin.kind is OriginKind.EMPTY


def test_an_empty_start_that_was_lost_before_its_first_batch_begins_again(history: History) -> None:
    history.start("empty", discard_state=True)

    assert history.live.positions().offset is None
    assert history.start()[0] is RecoveryKind.RESUME
    history.live.delete()
    assert history.start()[0] is RecoveryKind.START_EMPTY
