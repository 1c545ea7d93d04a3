"""Questions about many jobs at once, which the sensors ask at each tick: each job gets its own answer."""

from __future__ import annotations

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import EventType, ImageHistory, ImageRecord, ImageTally, ImageTrigger, StartCause
from tests.as_writer import as_writer
from tests.catalog.conftest import ManualClock, holder

JOBS = ("orders", "payments", "quiet")


@pytest.fixture(autouse=True)
def jobs(catalog: Catalog) -> None:
    for job_id in JOBS:
        catalog.jobs.ensure(job_id, name=job_id, asset_key=job_id, options={})


def begin_execution(catalog: Catalog, job_id: str, name: str) -> str:
    execution_id = f"{job_id}-{name}"
    as_writer(catalog, job_id).executions.begin(
        execution_id, run_id=f"run of {execution_id}", cause=StartCause.MANUAL, holder=holder(name)
    )
    return execution_id


def begin_image(catalog: Catalog, job_id: str, number: int, *, timeline: int = 0) -> str:
    image_id = f"{job_id}-{number}"
    as_writer(catalog, job_id).images.begin(
        image_id=image_id,
        execution_id=None,
        kind="CHECKPOINT",
        number=number,
        trigger=ImageTrigger.PERIODIC,
        timeline=timeline,
    )
    return image_id


def image(catalog: Catalog, job_id: str, number: int, *, timeline: int = 0, size: int = 10) -> ImageRecord:
    image_id = begin_image(catalog, job_id, number, timeline=timeline)
    return as_writer(catalog).complete(image_id, full_bytes=size, incremental_bytes=number, rows=number * 100)


def test_the_newest_execution_of_each_job(catalog: Catalog) -> None:
    begin_execution(catalog, "orders", "a")
    newest = begin_execution(catalog, "orders", "b")
    only = begin_execution(catalog, "payments", "a")
    found = catalog.executions.latest_of(JOBS)
    assert {job_id: execution.execution_id for job_id, execution in found.items()} == {
        "orders": newest,
        "payments": only,
    }


def test_unsettled_executions_by_their_runs(catalog: Catalog) -> None:
    begin_execution(catalog, "orders", "a")
    orders = begin_execution(catalog, "orders", "b")
    begin_execution(catalog, "payments", "a")
    assert catalog.executions.unsettled_runs() == {"run of orders-b": "orders", "run of payments-a": "payments"}
    assert [found.execution_id for found in catalog.executions.unsettled({"run of orders-b", "nope"})] == [orders]
    assert catalog.executions.unsettled(()) == []


def test_the_image_that_each_job_would_be_recovered_from(catalog: Catalog) -> None:
    image(catalog, "orders", 1)
    newest = image(catalog, "orders", 2)
    begin_image(catalog, "orders", 3)
    first = image(catalog, "payments", 1)
    image(catalog, "payments", 2)
    as_writer(catalog, "payments").jobs.switch_live_directory("/live/1", restored_image_id=first.image_id)
    assert catalog.images.newest_of(JOBS) == {"orders": newest, "payments": first}


def test_the_history_of_each_job(catalog: Catalog, clock: ManualClock) -> None:
    image(catalog, "orders", 1, size=1)
    clock.now_ms += 1000
    since_ms = clock.now_ms
    image(catalog, "orders", 2, size=2)
    clock.now_ms += 1000
    newest = image(catalog, "orders", 3, size=3)
    catalog.images.verified(newest.image_id, None)
    clock.now_ms += 1000
    catalog.images.verified("orders-2", "torn")
    for number, reason in ((4, "full"), (5, "gone")):
        as_writer(catalog).images.fail(begin_image(catalog, "orders", number), reason)
    as_writer(catalog).images.fail(begin_image(catalog, "payments", 1), "no disk")

    told = catalog.images.histories(dict.fromkeys([*JOBS, "never started"], since_ms) | {"payments": 0})

    assert told == {
        "orders": ImageHistory(catalog.images.get(newest.image_id), catalog.images.get("orders-2"), 2, "gone", 2),
        "payments": ImageHistory(None, None, 1, "no disk", None),
        "quiet": ImageHistory(),
        "never started": ImageHistory(),
    }


def test_what_checkpoints_amount_to_in_spans_of_events(catalog: Catalog) -> None:
    for number in (1, 2, 3):
        image(catalog, "orders", number)
        image(catalog, "payments", number)
    sequences = {event.image_id: event.sequence for event in catalog.events.after(0)}
    spans = [
        ("orders", sequences["orders-1"], sequences["orders-3"]),
        ("quiet", 0, sequences["orders-3"]),
        ("payments", 0, sequences["payments-1"]),
    ]
    assert catalog.images.tallies(spans) == [ImageTally(2, 500, 5), ImageTally(0, 0, 0), ImageTally(1, 100, 1)]
    assert catalog.images.tallies([]) == []


@pytest.mark.parametrize(("each", "of_orders"), [(1, [3]), (2, [2, 3]), (4, [1, 2, 3])])
def test_the_last_events_of_each_job(catalog: Catalog, each: int, of_orders: list[int]) -> None:
    for number in (1, 2, 3):
        image(catalog, "orders", number)
        as_writer(catalog).deleted(f"orders-{number}", "another type of event")
    image(catalog, "payments", 1)
    up_to = catalog.events.latest_sequence()
    image(catalog, "orders", 4)

    told = catalog.events.last_of(JOBS, [EventType.CHECKPOINT_COMPLETED], up_to=up_to, each=each)

    assert {job_id: [event.image_id for event in found] for job_id, found in told.items()} == {
        "orders": [f"orders-{number}" for number in of_orders],
        "payments": ["payments-1"],
        "quiet": [],
    }
