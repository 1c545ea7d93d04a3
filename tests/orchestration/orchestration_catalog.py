"""What a test writes into a catalog in place of a running stream."""

from __future__ import annotations

import itertools
import uuid
from typing import Any

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionRecord, Holder, SnapshotRecord, SnapshotTrigger, StartCause
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.as_writer import as_writer

HOST = Holder(execution_id="", run_id="", host="here", pid=1, process_start_ticks=1, boot_id="boot", jvm_pid=None)
FIGURES = {
    "location": "file:///checkpoints/orders/chk-7",
    "batch_id": 41,
    "query_id": "q",
    "full_bytes": 5_000_000_000,
    "incremental_bytes": 1234,
    "file_count": 9,
    "rows": 1000,
    "state_rows": 77,
    "watermark": "2013-01-02T03:04:05.678Z",
    "duration_ms": 350,
}
_numbers = itertools.count(1)


def register(catalog: Catalog, stream_id: str) -> None:
    catalog.streams.ensure(stream_id, name=stream_id, asset_key=stream_id, options={})


def take_snapshot(
    catalog: Catalog,
    stream_id: str,
    *,
    kind: SnapshotKind = SnapshotKind.CHECKPOINT,
    execution_id: str | None = None,
    **facts: Any,
) -> SnapshotRecord:
    snapshot = begin_snapshot(catalog, stream_id, kind=kind, execution_id=execution_id)
    return as_writer(catalog).complete(snapshot.snapshot_id, **{**FIGURES, **facts})


def begin_snapshot(
    catalog: Catalog, stream_id: str, *, kind: SnapshotKind = SnapshotKind.CHECKPOINT, execution_id: str | None = None
) -> SnapshotRecord:
    return as_writer(catalog, stream_id).snapshots.start(
        snapshot_id=str(uuid.uuid4()),
        execution_id=execution_id,
        kind=kind,
        number=next(_numbers),
        trigger=SnapshotTrigger.PERIODIC,
        timeline=0,
    )


def begin_execution(
    catalog: Catalog,
    stream_id: str,
    run_id: str,
    *,
    cause: StartCause = StartCause.MANUAL,
    running: bool = True,
    code_version: str | None = None,
) -> ExecutionRecord:
    execution_id = str(uuid.uuid4())
    as_writer(catalog, stream_id).executions.start(
        execution_id, run_id=run_id, cause=cause, holder=HOST, code_version=code_version
    )
    if running:
        as_writer(catalog).executions.running(execution_id, live_directory="file:///live/live-1", recovery={})
    return catalog.executions.get(execution_id)
