"""A savepoint of a stream that is not running: recorded, or failed, whatever happens to the catalog."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_ckpt.catalog.records import SnapshotStatus
from dagster_ckpt.errors import (
    CatalogError,
)
from tests.support import verbs
from tests.support.retention_shelf import Shelf

ORIGIN = "a test"


@pytest.mark.parametrize("is_done", [True, False], ids=["recorded", "not recorded"])
def test_a_savepoint_of_a_stopped_stream_is_in_the_catalog_or_not_at_all(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    records = shelf.stream.catalog.snapshots
    complete = records.complete

    def cut_off(*args: Any, **facts: Any) -> None:
        if is_done:
            complete(*args, **facts)
        raise CatalogError("the connection broke")

    monkeypatch.setattr(records, "complete", cut_off)

    if is_done:
        assert verbs.trigger_savepoint(shelf.stream, origin=ORIGIN).status is SnapshotStatus.COMPLETED
        return
    with pytest.raises(CatalogError, match="the connection broke"):
        verbs.trigger_savepoint(shelf.stream, origin=ORIGIN)
    assert [snapshot.status for snapshot in records.of_stream("orders")] == [SnapshotStatus.FAILED]
    assert list((shelf.root / "savepoints").rglob("_metadata")) == []


def test_a_savepoint_of_a_stopped_stream_that_is_interrupted_is_not_under_way_for_ever(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_args: Any, **_how: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shelf.stream.store, "write_savepoint", interrupted)

    with pytest.raises(KeyboardInterrupt):
        verbs.trigger_savepoint(shelf.stream, origin=ORIGIN)

    [snapshot] = shelf.stream.catalog.snapshots.of_stream("orders")
    assert (snapshot.status, snapshot.failure_reason) == (SnapshotStatus.FAILED, "KeyboardInterrupt")
