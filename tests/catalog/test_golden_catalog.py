"""A catalog that an earlier version wrote (`tests/golden/catalog-<revision>.sql`) opens, reads and goes on as it is."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import inspect

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import UpgradePhase
from dagster_ckpt.catalog.records import (
    CompletedSnapshot,
    ExecutionStatus,
    HoldKind,
    OriginKind,
    RequestStatus,
    SnapshotStatus,
    SnapshotTrigger,
    StartCause,
)
from dagster_ckpt.errors import SnapshotHeldError
from dagster_ckpt.values import metrics
from tests.catalog.conftest import holder

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(params=sorted(path.name for path in GOLDEN.glob("catalog-*.sql")))
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Catalog:
    connection = sqlite3.connect(tmp_path / "catalog.db")
    connection.executescript((GOLDEN / request.param).read_text())
    connection.close()
    return Catalog(f"sqlite:///{tmp_path / 'catalog.db'}")


def test_its_deployment_keeps_its_id(golden: Catalog) -> None:
    assert golden.deployment_id == "11111111-2222-3333-4444-555555555555"


def test_its_stream_still_knows_its_directory_origin_and_pending_restore(golden: Catalog) -> None:
    stream = golden.streams.get("orders")
    assert stream.broken is None
    assert (stream.live_directory, stream.live_generation, stream.timeline) == ("/live/orders/live-2", 2, 1)
    assert (stream.restored_snapshot_id, stream.preferred_savepoint_id) == ("snapshot-2", "snapshot-4")
    assert (stream.next_number, stream.accepted_plan, stream.state_edits) == (5, "plan-2:abc", ("edit-1",))
    assert stream.pending_restore is not None
    assert stream.origin is not None
    assert (stream.origin.kind, stream.origin.batch_id) == (OriginKind.SNAPSHOT, 3)
    assert (stream.origin.snapshot_kind, stream.origin.snapshot_number) == ("CHECKPOINT", 2)
    assert stream.origin.sinks == ("FileSink[/out]",)
    assert [each.stream_id for each in golden.streams.all()] == ["copies", "orders"]


def test_its_snapshots_are_read_as_they_were_recorded(golden: Catalog) -> None:
    four, three, two, one = golden.snapshots.of_stream("orders")
    assert all(each.broken is None for each in (one, two, three, four))
    assert [each.kind for each in (one, two, three, four)] == ["CHECKPOINT", "CHECKPOINT", "CHECKPOINT", "SAVEPOINT"]
    assert [each.status for each in (one, two, three, four)] == [
        SnapshotStatus.DELETED,
        SnapshotStatus.COMPLETED,
        SnapshotStatus.FAILED,
        SnapshotStatus.COMPLETED,
    ]
    assert (two.batch_id, two.full_bytes, two.incremental_bytes, two.rows, two.state_rows) == (3, 1002, 2, 10, 5)
    assert (two.location, two.query_id) == ("file:///snapshots/orders/chk-2", "query-1")
    assert (two.label, two.trigger, two.lags) == ("kept", SnapshotTrigger.PERIODIC, {"orders-0": 3, "orders-1": 4})
    assert (two.is_proven, four.is_proven, two.watermark_ms) == (True, True, 1_700_000_000_000)
    assert (four.label, four.schedule, four.state_edits, four.edit["by"]) == (
        "end-of-june",
        "monthly",
        ("edit-1",),
        "anna",
    )
    assert (one.verified_problem, three.failure_reason) == (
        "chk-1/_metadata is damaged",
        "the storage did not answer",
    )
    assert [each.snapshot_id for each in golden.snapshots.restorable("orders")] == ["snapshot-4", "snapshot-2"]
    assert [each.kind for each in golden.history.figures("orders", limit=9)] == [
        "CHECKPOINT",
        "CHECKPOINT",
        "SAVEPOINT",
    ]


def test_its_executions_leases_and_failures_are_read(golden: Catalog) -> None:
    second, first = golden.executions.of_stream("orders")
    assert (first.broken, second.broken) == (None, None)
    assert (first.cause, first.status, first.code_version) == (StartCause.MANUAL, ExecutionStatus.FAILED, "v1")
    assert (second.cause, second.reason) == (StartCause.RESTART_NEW_RUN, "its process died")
    assert first.recovery is not None
    assert first.recovery["kind"] == "EMPTY"
    assert golden.executions.last_sinks("orders") == ["FileSink[/out]"]
    assert golden.executions.last_batch("orders", "/live/orders/live-1") == 3
    assert golden.executions.last_sources("orders", "/live/orders/live-1")
    lease = golden.leases.current("orders")
    assert lease is not None
    assert (lease.token, lease.execution_id, lease.expired) == (2, "execution-2", True)
    [failure] = golden.recoveries.of_stream("orders")
    assert (failure.point, failure.error, failure.rewound_ms) == ("snapshot-1", "RestoreError", 60_000)


def test_its_requests_holds_journal_and_desired_states_are_read(golden: Catalog) -> None:
    assert golden.requests.get("request-1").status is RequestStatus.PENDING
    assert golden.requests.get("request-2").status is RequestStatus.WITHDRAWN
    launch = golden.launches.latest("orders")
    assert launch is not None
    assert launch.command == "spark-submit driver.py"
    kinds = [hold.kind for hold in golden.holds.on("snapshot-2")]
    assert sorted(kinds) == [HoldKind.REFERENCE, HoldKind.REFERENCE, HoldKind.TAG]
    assert golden.holds.tagged("orders") == {"snapshot-2"}
    first, second = golden.journal.after("orders", 3)
    assert (first.batch_id, first.rows, first.is_committed, second.rows) == (4, 17, True, None)
    assert first.files["metadata"] == b'{"id":"query-1"}'
    desired = golden.desired_states.find("orders")
    assert desired is not None
    assert desired.broken is None
    assert desired.upgrade is not None
    assert (desired.upgrade.phase, desired.upgrade.snapshot_id) == (UpgradePhase.UPGRADING, "snapshot-4")
    assert desired.preflight is not None
    assert (desired.preflight.passed, desired.alert) == (True, "no run answers")
    assert len(golden.events.after(0)) == golden.events.latest_sequence() > 15


def test_its_streams_are_counted_since_the_revision_that_counts(
    golden: Catalog, request: pytest.FixtureRequest
) -> None:
    read = {(each.metric, each.kind): each.value for each in golden.metrics.read(["orders"])}
    since = read.pop((metrics.COUNTING_SINCE, ""))
    if "0001" in request.node.callspec.id:
        assert abs(since - golden.now_ms() / 1000) < 600
        assert {value for (metric, _), value in read.items() if metric.is_counter} == {0}
    else:
        assert since == 1_700_000_001
        assert (read[metrics.COMPLETED, "checkpoint"], read[metrics.COMPLETED, "savepoint"]) == (2, 1)
        assert (read[metrics.LAST_DURATION, "checkpoint"], read[metrics.FREED, ""]) == (1.5, 77)


def test_its_streams_go_on(golden: Catalog) -> None:
    lease = golden.leases.acquire("orders", holder("3"), 30_000)
    golden.executions.start(lease, "execution-3", run_id="run-3", cause=StartCause.MANUAL, holder=holder("3"))
    golden.streams.restore_finished(lease)
    started = golden.snapshots.get("snapshot-2")
    golden.snapshots.start(
        lease,
        snapshot_id="snapshot-5",
        execution_id="execution-3",
        kind=started.kind,
        number=5,
        trigger=SnapshotTrigger.PERIODIC,
        timeline=1,
    )
    golden.snapshots.complete(lease, "snapshot-5", CompletedSnapshot("file:///snapshots/orders/chk-5", batch_id=6))
    newest = golden.snapshots.newest_checkpoint("orders")
    assert newest is not None
    assert newest.snapshot_id == "snapshot-5"
    with pytest.raises(SnapshotHeldError, match="tag by anna"):
        golden.snapshots.mark_deleting("snapshot-2", lease=lease)
    assert golden.pruning.prune("orders", before_ms=1_800_000_000_000, dry_run=True).total > 0


def test_a_new_catalog_has_the_same_schema(golden: Catalog, tmp_path: Path) -> None:
    def schema(catalog: Catalog) -> dict[str, object]:
        seen = inspect(catalog.database.engine)
        return {
            table: (
                [
                    (each["name"], str(each["type"]), each["nullable"], each["default"])
                    for each in seen.get_columns(table)
                ],
                sorted((each["name"] or "", each["column_names"]) for each in seen.get_indexes(table)),
                seen.get_pk_constraint(table),
                sorted((each["name"] or "", each["referred_table"]) for each in seen.get_foreign_keys(table)),
            )
            for table in seen.get_table_names()
        }

    assert schema(Catalog(f"sqlite:///{tmp_path / 'new.db'}")) == schema(golden)
