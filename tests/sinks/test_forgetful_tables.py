"""A Delta table whose log does not reach back: a refused start changes nothing, and each way out leads out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.pending_restore import Emptied, ToSnapshot
from dagster_ckpt.errors import RowsAtRiskError, SinkRollbackError
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import RunRequest
from dagster_ckpt.sinks.delta import DeltaTable
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History
from tests.support.verbs import trigger_savepoint

BEGINS = 9


class StartedError(BaseException):
    """The query would start now."""


class Orders:
    """A stream and its table, of whose log retention has left the newest versions."""

    def __init__(self, root: Path) -> None:
        self.history = History(root)
        self.log = root / "table" / "_delta_log"
        self.log.mkdir(parents=True)
        self.forget_before(LAST - 2)
        self.history.sinks(f"DeltaSink[{self.log.parent}]")

    def forget_before(self, first: int, last: int = LAST) -> None:
        for path in self.log.iterdir():
            path.unlink()
        for batch in range(first, last + 1):
            self.write(
                batch + BEGINS,
                {"commitInfo": {"operation": "STREAMING UPDATE"}},
                {"txn": {"appId": self.history.query_id, "version": batch}},
                {"add": {"path": f"{batch}.parquet", "dataChange": True}},
            )

    def write(self, version: int, *actions: dict[str, Any]) -> None:
        (self.log / f"{version:020}.json").write_text("\n".join(map(json.dumps, actions)))

    def start(self, text: str, **how: Any) -> None:
        def started(_live: object) -> None:
            raise StartedError

        request = RunRequest(run_id="run", start_query=started, start_from=StartFrom(text, **how))  # type: ignore[arg-type]
        execute_stream(self.history.shelf.stream, request)

    def stands(self) -> tuple[Any, ...]:
        record = self.history.shelf.stream.catalog.streams.get(STREAM)
        return record.live_directory, record.timeline, record.pending_restore


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Orders]:
    # It needs a session.
    monkeypatch.setattr(DeltaTable, "fence", lambda *_: None)
    orders = Orders(tmp_path)
    yield orders
    orders.history.close()


def test_a_start_from_nothing_is_refused_and_goes_on_if_loss_is_accepted(orders: Orders) -> None:
    before = orders.stands()

    with pytest.raises(RowsAtRiskError, match=r"run: DELETE FROM delta.*To leave its rows, start with accept_loss"):
        orders.start("empty", discard_state=True)
    assert orders.stands() == before

    with pytest.raises(StartedError):
        orders.start("empty", discard_state=True, accept_loss=True)
    live, timeline, pending = orders.stands()
    assert (live != before[0], timeline, pending) == (True, 1, None)


def test_a_start_from_nothing_goes_on_once_a_person_has_emptied_the_table(orders: Orders) -> None:
    emptied = {"commitInfo": {"operation": "DELETE", "operationParameters": {"predicate": "[]"}}}
    orders.write(LAST + BEGINS + 1, emptied, {"remove": {"path": "8.parquet", "dataChange": True}})

    with pytest.raises(StartedError):
        orders.start("empty", discard_state=True)

    assert orders.stands()[2] is None


def test_a_start_from_a_snapshot_goes_on_if_loss_is_accepted(orders: Orders) -> None:
    trigger_savepoint(orders.history.shelf.stream, origin="a test", label="kept")
    for batch in range(LAST + 1, LAST + 5):
        orders.history.commit(batch)
    orders.history.sinks(f"DeltaSink[{orders.log.parent}]")
    orders.forget_before(LAST + 2, LAST + 4)
    before = orders.stands()

    with pytest.raises(RowsAtRiskError, match="RESTORE it to the version of the batch"):
        orders.start("kept")
    assert orders.stands() == before

    with pytest.raises(StartedError):
        orders.start("kept", accept_loss=True)
    assert orders.stands()[2] is None


@pytest.mark.parametrize("pending", [Emptied, ToSnapshot])
def test_a_start_that_died_before_its_sinks_followed_is_finished_without_being_asked_again(
    orders: Orders, monkeypatch: pytest.MonkeyPatch, pending: type
) -> None:
    trigger_savepoint(orders.history.shelf.stream, origin="a test", label="kept")
    for batch in range(LAST + 1, LAST + 5):
        orders.history.commit(batch)
    orders.history.sinks(f"DeltaSink[{orders.log.parent}]")
    orders.forget_before(LAST + 2, LAST + 4)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DeltaTable, "fence", killed)
        text = "empty" if pending is Emptied else "kept"
        with pytest.raises(KeyboardInterrupt):
            orders.start(text, discard_state=pending is Emptied, accept_loss=True)
    assert isinstance(orders.stands()[2], pending)

    with pytest.raises(StartedError):
        orders.start("latest")
    assert orders.stands()[2] is None


def test_a_start_that_was_stuck_is_finished_if_loss_is_accepted(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a former version left it: switched, without the consent."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    streams = orders.history.shelf.stream.catalog.streams
    switch = streams.switch_live_directory

    def forgetful(*arguments: Any, **options: Any) -> Any:
        return switch(*arguments, **{**options, "pending_restore": Emptied(sinks=options["pending_restore"].sinks)})

    with monkeypatch.context() as patch:
        patch.setattr(DeltaTable, "fence", killed)
        patch.setattr(streams, "switch_live_directory", forgetful)
        with pytest.raises(KeyboardInterrupt):
            orders.start("empty", discard_state=True, accept_loss=True)

    with pytest.raises(SinkRollbackError, match="start with accept_loss"):
        orders.start("latest")
    with pytest.raises(StartedError):
        orders.start("latest", accept_loss=True)
    assert orders.stands()[2] is None
