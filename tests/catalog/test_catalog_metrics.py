"""Counts and last figures of streams: each event changes them in its transaction, and they outlive the rows."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import (
    CompletedSnapshot,
    EventType,
    ExecutionStatus,
    LeaseRecord,
    SnapshotTrigger,
    StartCause,
)
from dagster_ckpt.catalog.tables import deployment
from dagster_ckpt.values import metrics
from dagster_ckpt.values.metrics import Metric
from dagster_ckpt.values.modes import SnapshotKind
from tests.catalog.conftest import holder
from tests.support.manual_clock import ManualClock

PROGRESS = {
    "batch_ms": 250,
    "input_rows": 40,
    "state_rows": 7,
    "state_memory": 4096,
    "watermark": "1970-01-01T00:10:00.000Z",
    "sources": [
        {"source": "KafkaV2[Subscribe[orders]]", "behind": 12},
        {"source": "KafkaV2[Subscribe[orders]]", "behind": 9},
        {"source": "FileStreamSource[/in]", "behind": None},
    ],
}


def read(catalog: Catalog, metric: Metric, kind: str = "") -> float | None:
    found = [each for each in catalog.metrics.read(["orders"]) if each.metric is metric and each.kind == kind]
    assert len(found) < 2
    return found[0].value if found else None


def started(catalog: Catalog, name: str = "a", cause: StartCause = StartCause.MANUAL) -> LeaseRecord:
    lease = catalog.leases.acquire("orders", holder(name), 30_000)
    catalog.executions.start(lease, f"execution-{name}", run_id=f"run-{name}", cause=cause, holder=holder(name))
    return lease


def running(catalog: Catalog, lease: LeaseRecord, name: str = "a") -> None:
    catalog.executions.running(lease, f"execution-{name}", live_directory="/live", recovery={})


def attempt(catalog: Catalog, lease: LeaseRecord, number: int, kind: SnapshotKind = SnapshotKind.CHECKPOINT) -> str:
    name = f"snapshot-{number}"
    catalog.snapshots.start(
        lease,
        snapshot_id=name,
        execution_id=lease.execution_id,
        kind=kind,
        number=number,
        trigger=SnapshotTrigger.PERIODIC,
        timeline=0,
    )
    return name


FACTS = CompletedSnapshot("file:///chk", batch_id=3, full_bytes=1000, incremental_bytes=100, duration_ms=1500)


def test_completed_and_failed_attempts_are_counted_by_kind(catalog: Catalog, clock: ManualClock) -> None:
    lease = started(catalog)
    catalog.snapshots.complete(lease, attempt(catalog, lease, 1), FACTS, alignment_ms=400)
    catalog.snapshots.complete(lease, attempt(catalog, lease, 2), FACTS, alignment_ms=500)
    catalog.snapshots.fail(lease, attempt(catalog, lease, 3, SnapshotKind.SAVEPOINT), "no space")
    attempt(catalog, lease, 4)
    assert (read(catalog, metrics.COMPLETED, "checkpoint"), read(catalog, metrics.COMPLETED, "savepoint")) == (2, 0)
    assert (read(catalog, metrics.FAILED, "checkpoint"), read(catalog, metrics.FAILED, "savepoint")) == (0, 1)
    assert (read(catalog, metrics.IN_PROGRESS, "checkpoint"), read(catalog, metrics.IN_PROGRESS, "savepoint")) == (1, 0)
    assert read(catalog, metrics.WRITTEN, "checkpoint") == 200
    assert read(catalog, metrics.LAST_SIZE, "checkpoint") == 1000
    assert read(catalog, metrics.LAST_NEW_SIZE, "checkpoint") == 100
    assert (read(catalog, metrics.LAST_DURATION, "checkpoint"), read(catalog, metrics.LAST_DURATION, "savepoint")) == (
        1.5,
        None,
    )
    assert read(catalog, metrics.LAST_ALIGNMENT, "checkpoint") == 0.5
    assert read(catalog, metrics.LAST_TIME, "checkpoint") == clock() / 1000


def test_a_renewed_checkpoint_is_as_young_as_a_new_one(catalog: Catalog, clock: ManualClock) -> None:
    lease = started(catalog)
    catalog.snapshots.complete(lease, attempt(catalog, lease, 1), FACTS)
    clock.now_ms += 5_000
    catalog.snapshots.renew(lease, "snapshot-1", attempt_id=attempt(catalog, lease, 2))
    assert read(catalog, metrics.LAST_TIME, "checkpoint") == clock() / 1000
    assert read(catalog, metrics.COMPLETED, "checkpoint") == 1


def test_counts_outlive_the_rows_that_they_counted(catalog: Catalog, clock: ManualClock) -> None:
    lease = started(catalog)
    catalog.snapshots.complete(lease, attempt(catalog, lease, 1), FACTS)
    catalog.snapshots.mark_deleting("snapshot-1", lease=lease)
    catalog.snapshots.deleted("snapshot-1", "subsumed", lease=lease, freed_bytes=77)
    catalog.snapshots.deleted("snapshot-1", "subsumed", lease=lease, freed_bytes=77)
    clock.now_ms += 86_400_000
    assert catalog.pruning.prune("orders", before_ms=clock()).total > 0
    assert read(catalog, metrics.COMPLETED, "checkpoint") == 1
    assert read(catalog, metrics.DELETED) == 1
    assert read(catalog, metrics.FREED) == 77


def test_a_change_that_is_not_committed_is_not_counted(catalog: Catalog) -> None:
    lease = started(catalog)
    name = attempt(catalog, lease, 1)

    def fail_after_the_event() -> None:
        with catalog.database.writing_under(lease) as connection:
            catalog.database.record_event(connection, "orders", EventType.CHECKPOINT_COMPLETED, snapshot_id=name)
            raise RuntimeError("not committed")

    with pytest.raises(RuntimeError, match="not committed"):
        fail_after_the_event()
    assert read(catalog, metrics.COMPLETED, "checkpoint") == 0


def test_restarts_are_counted_with_the_time_that_they_took(catalog: Catalog, clock: ManualClock) -> None:
    lease = started(catalog)
    running(catalog, lease)
    clock.now_ms += 1_000
    catalog.executions.heartbeat(lease, "execution-a", PROGRESS)
    clock.now_ms += 4_000
    catalog.executions.end(lease, "execution-a", ExecutionStatus.FAILED, "no memory")
    catalog.executions.start(
        lease, "execution-b", run_id="run-a", cause=StartCause.RESTART_IN_PLACE, holder=holder("a")
    )
    clock.now_ms += 3_000
    running(catalog, lease, "b")
    assert (read(catalog, metrics.RESTARTS, "in_place"), read(catalog, metrics.RESTARTS, "new_run")) == (1, 0)
    assert (read(catalog, metrics.LAST_RECOVERY), read(catalog, metrics.RECOVERY_TIME)) == (7, 7)
    assert (read(catalog, metrics.FAILURES), read(catalog, metrics.TERMINAL_FAILURES)) == (1, 0)
    catalog.executions.record_terminal_failure("execution-b", "no attempts left")
    assert read(catalog, metrics.TERMINAL_FAILURES) == 1


def test_a_manual_start_is_no_recovery(catalog: Catalog, clock: ManualClock) -> None:
    running(catalog, started(catalog))
    clock.now_ms += 60_000
    running(catalog, started(catalog, "b"), "b")
    assert (read(catalog, metrics.LAST_RECOVERY), read(catalog, metrics.RESTARTS, "new_run")) == (None, 0)


def test_a_lease_that_is_taken_over_was_lost(catalog: Catalog, clock: ManualClock) -> None:
    taken = catalog.leases.acquire("orders", holder("a"), 1_000)
    clock.now_ms += 2_000
    taken = catalog.leases.acquire("orders", holder("b"), 1_000)
    catalog.leases.acquire("orders", holder("c"), 1_000, take_over=taken)
    assert (read(catalog, metrics.LEASES_LOST, "ended"), read(catalog, metrics.LEASES_LOST, "unproven")) == (1, 1)


def test_the_figures_of_a_query_are_given_while_it_runs(catalog: Catalog, clock: ManualClock) -> None:
    lease = started(catalog)
    running(catalog, lease)
    catalog.executions.heartbeat(lease, "execution-a", PROGRESS)
    assert read(catalog, metrics.STATUS, "running") == 1
    assert (read(catalog, metrics.BATCH_DURATION), read(catalog, metrics.ROWS)) == (0.25, 40)
    assert (read(catalog, metrics.STATE_ROWS), read(catalog, metrics.STATE_SIZE)) == (7, 4096)
    assert read(catalog, metrics.WATERMARK_DELAY) == 400
    assert read(catalog, metrics.SOURCE_LAG, "KafkaV2[Subscribe[orders]]") == 12
    assert read(catalog, metrics.SOURCE_LAG, "FileStreamSource[/in]") is None
    clock.now_ms += 31_000
    assert (read(catalog, metrics.STATUS, "running"), read(catalog, metrics.STATUS, "dead")) == (None, 1)
    assert (read(catalog, metrics.WATERMARK_DELAY), read(catalog, metrics.ROWS)) == (None, 40)


def test_counters_say_since_when_they_count(catalog: Catalog, clock: ManualClock) -> None:
    clock.now_ms += 9_000
    assert read(catalog, metrics.COUNTING_SINCE) == catalog.streams.get("orders").created_at_ms / 1000
    with catalog.database.writing() as connection:
        connection.execute(deployment.update().values(counting_since_ms=clock()))
    assert read(catalog, metrics.COUNTING_SINCE) == clock() / 1000


@pytest.mark.parametrize(
    "progress", ['"no object"', '{"batch_ms": "x", "sources": [3, {"behind": true}], "watermark": 5}']
)
def test_a_broken_row_hides_only_its_own_figures(catalog: Catalog, progress: str) -> None:
    catalog.streams.ensure("copies", name="copies", asset_key="copies", options={})
    running(catalog, started(catalog))
    with catalog.database.writing() as connection:
        connection.execute(text("UPDATE executions SET progress = :progress"), {"progress": progress})
    assert read(catalog, metrics.STATUS, "running") == 1
    assert read(catalog, metrics.BATCH_DURATION) is None
    assert {each.stream_id for each in catalog.metrics.read()} == {"copies", "orders"}


def test_every_declared_metric_is_read(catalog: Catalog) -> None:
    lease = started(catalog)
    running(catalog, lease)
    catalog.executions.heartbeat(lease, "execution-a", PROGRESS)
    catalog.snapshots.complete(lease, attempt(catalog, lease, 1), FACTS, alignment_ms=400)
    catalog.executions.start(
        lease, "execution-b", run_id="run-a", cause=StartCause.RESTART_IN_PLACE, holder=holder("a")
    )
    running(catalog, lease, "b")
    catalog.executions.heartbeat(lease, "execution-b", PROGRESS)
    assert {each.metric for each in catalog.metrics.read()} == set(metrics.METRICS)
