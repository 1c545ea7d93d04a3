"""A row that cannot be read, of a newer version or damaged, hides no other and is never taken for a good one."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.pending_restore import ToSnapshot
from dagster_ckpt.catalog.records import (
    ExecutionStatus,
    RequestKind,
    RequestStatus,
    SnapshotStatus,
    SnapshotTrigger,
    StartCause,
)
from dagster_ckpt.errors import CatalogError
from dagster_ckpt.values.modes import SnapshotKind
from tests.catalog.conftest import holder
from tests.support.as_writer import as_writer


def damage(catalog: Catalog, statement: str) -> None:
    with catalog.database.writing() as connection:
        connection.execute(text(statement))


@pytest.fixture
def running(catalog: Catalog) -> Catalog:
    """A catalog in which two streams run."""
    for stream_id in ("broken", "orders"):
        catalog.streams.ensure(stream_id, name=stream_id, asset_key=stream_id, options={})
        as_writer(catalog, stream_id).executions.start(
            f"of-{stream_id}", run_id="run", cause=StartCause.MANUAL, holder=holder(stream_id)
        )
    return catalog


@pytest.mark.parametrize(
    ("column", "value"), [("status", "MELTED"), ("cause", "COSMIC"), ("progress", "{oops"), ("recovery", "[]")]
)
def test_an_execution_that_cannot_be_read_does_not_hide_those_of_other_streams(
    running: Catalog, column: str, value: str
) -> None:
    damage(running, f"UPDATE executions SET {column} = '{value}' WHERE stream_id = 'broken'")
    broken, good = running.executions.unsettled()
    assert (broken.stream_id, good.stream_id, good.broken) == ("broken", "orders", None)
    assert value in (broken.broken or "")
    assert column in (broken.broken or "")


def test_an_execution_of_unknown_status_is_neither_running_nor_over(running: Catalog) -> None:
    damage(running, "UPDATE executions SET status = 'MELTED' WHERE stream_id = 'broken'")
    assert running.executions.get("of-broken").status is ExecutionStatus.BROKEN
    running.executions.end_unheld("of-broken", ExecutionStatus.FAILED, "its process died")
    assert running.executions.get("of-broken").status is ExecutionStatus.FAILED


@pytest.mark.parametrize(("column", "value"), [("kind", "DEFROST"), ("arguments", "{oops")])
def test_a_request_that_cannot_be_read_is_listed_as_one_nobody_carries_out(
    catalog: Catalog, column: str, value: str
) -> None:
    broken = catalog.requests.submit("orders", RequestKind.SAVEPOINT, arguments={"label": "x"}, origin="me")
    damage(catalog, f"UPDATE requests SET {column} = '{value}'")
    (listed,) = catalog.requests.pending("orders")
    assert (listed.request_id, listed.kind, listed.arguments) == (
        broken.request_id,
        RequestKind.UNKNOWN,
        {"label": "x"} if column == "kind" else {},
    )
    assert value in (listed.broken or "")
    assert catalog.requests.withdraw(broken.request_id)


def test_a_request_of_unknown_status_is_broken(catalog: Catalog) -> None:
    request = catalog.requests.submit("orders", RequestKind.CANCEL, origin="me")
    damage(catalog, "UPDATE requests SET status = 'MELTED'")
    assert catalog.requests.get(request.request_id).status is RequestStatus.BROKEN


def test_a_completed_snapshot_that_cannot_be_read_is_listed_but_never_recovered_from(catalog: Catalog) -> None:
    as_writer(catalog).snapshots.start(
        snapshot_id="snapshot-1",
        execution_id=None,
        kind=SnapshotKind.CHECKPOINT,
        number=1,
        trigger=SnapshotTrigger.PERIODIC,
        timeline=0,
    )
    as_writer(catalog).complete("snapshot-1", location="file:///c/orders/chk-1")
    damage(catalog, "UPDATE snapshots SET properties = '{oops'")
    assert [snapshot.status for snapshot in catalog.snapshots.of_stream("orders")] == [SnapshotStatus.BROKEN]
    assert catalog.snapshots.completed("orders") == []
    assert catalog.snapshots.restorable("orders") == []
    assert catalog.snapshots.newest_checkpoint("orders") is None


def test_a_stream_whose_options_cannot_be_read_is_listed_and_still_starts(catalog: Catalog) -> None:
    damage(catalog, "UPDATE streams SET options = '{oops'")
    (listed,) = catalog.streams.all()
    assert (listed.options, listed.broken) == ({}, "options are not a JSON object: '{oops'")
    assert catalog.streams.get("orders") == listed


def test_a_restore_that_cannot_be_read_is_never_taken_for_none(catalog: Catalog) -> None:
    as_writer(catalog).streams.switch_live_directory(
        "/live/1", pending_restore=ToSnapshot(location="file:///c/orders/chk-1")
    )
    damage(catalog, "UPDATE streams SET pending_restore = '{oops'")
    assert "pending_restore" in (catalog.streams.all()[0].broken or "")
    for start in (
        lambda: catalog.streams.get("orders"),
        lambda: catalog.streams.ensure("orders", name="orders", asset_key="orders", options={}),
    ):
        with pytest.raises(CatalogError, match=r"unfinished restore.*set streams.pending_restore to NULL"):
            start()
    as_writer(catalog).streams.restore_finished()
    assert catalog.streams.get("orders").broken is None


def test_the_figures_of_a_snapshot_that_cannot_be_read_are_left_out(running: Catalog) -> None:
    for number in (1, 2):
        begun = as_writer(running).snapshots.start(
            snapshot_id=f"snapshot-{number}",
            execution_id="of-orders",
            kind=SnapshotKind.CHECKPOINT,
            number=number,
            trigger=SnapshotTrigger.PERIODIC,
            timeline=0,
        )
        as_writer(running).complete(begun.snapshot_id, batch_id=number)
    damage(running, "UPDATE snapshots SET kind = 'DEFROST' WHERE snapshot_id = 'snapshot-1'")

    assert [each.snapshot_id for each in running.history.figures("orders", limit=9)] == ["snapshot-2"]
