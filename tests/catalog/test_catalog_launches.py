"""Where executions run, and the handles of launched drivers."""

from __future__ import annotations

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import EventType, LaunchRecord, StartCause
from dagster_ckpt.errors import CatalogError
from tests.catalog.conftest import holder
from tests.support.as_writer import as_writer
from tests.support.manual_clock import ManualClock


def launch(catalog: Catalog, request_id: str, *, pid: int, stream_id: str = "orders") -> None:
    catalog.launches.record(
        LaunchRecord(
            request_id=request_id,
            stream_id=stream_id,
            run_id="run",
            host="here",
            boot_id="boot",
            pid=pid,
            process_start_ticks=5,
            command="spark-submit orders.py",
            log="/var/log/orders.log",
        )
    )


def test_the_newest_launch_of_a_stream_is_its_handle(catalog: Catalog, clock: ManualClock) -> None:
    assert catalog.launches.latest("orders") is None

    launch(catalog, "first", pid=1)
    clock.now_ms += 1
    launch(catalog, "second", pid=2)

    newest = catalog.launches.latest("orders")
    assert newest is not None
    assert (newest.request_id, newest.pid, newest.launched_at_ms) == ("second", 2, clock.now_ms)


def test_a_request_has_one_launch_the_last(catalog: Catalog) -> None:
    launch(catalog, "first", pid=1)
    launch(catalog, "first", pid=2)

    found = catalog.launches.get("first")
    assert found is not None
    assert found.pid == 2
    assert catalog.launches.get("another") is None


def test_a_launch_belongs_to_a_stream_of_the_catalog(catalog: Catalog) -> None:
    with pytest.raises(CatalogError):
        launch(catalog, "first", pid=1, stream_id="unknown")


def test_an_execution_tells_where_it_runs_once_its_query_is_started(catalog: Catalog) -> None:
    as_writer(catalog).executions.start("e", run_id="r", cause=StartCause.MANUAL, holder=holder())
    assert catalog.executions.get("e").application is None

    page = {"id": "local-1", "master": "local[1]", "page": "http://here:4040"}
    as_writer(catalog).executions.running("e", live_directory="/live/1", recovery={}, application=page)

    assert catalog.executions.get("e").application == page
    started, running = catalog.events.after(0)
    assert (started.type, running.type) == (EventType.EXECUTION_STARTED, EventType.EXECUTION_RUNNING)
    assert running.execution_id == "e"
