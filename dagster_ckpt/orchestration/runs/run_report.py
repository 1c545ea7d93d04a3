"""The short report at the end of a run: what the stream started from, what it did, and its last snapshots."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_ckpt.catalog.records import ExecutionRecord, SnapshotStatus
from dagster_ckpt.errors import CkptError
from dagster_ckpt.orchestration.tables import markdown_table
from dagster_ckpt.stream.snapshots import describe_snapshot
from dagster_ckpt.values.durations import rounded_duration, size, utc_time
from dagster_ckpt.values.redaction import without_secrets

if TYPE_CHECKING:
    from dagster_ckpt.runtime.run import Outcome
    from dagster_ckpt.stream.handle import StreamHandle

RUN_KEY = "dagster_ckpt/run"
SNAPSHOTS_KEY = "dagster_ckpt/last_snapshots"
SHOWN_SNAPSHOTS = 5

_LOG = logging.getLogger(__name__)


def run_report(stream: StreamHandle, outcome: Outcome) -> dict[str, Any]:
    """The end of a run as Dagster metadata; empty if the catalog cannot be read, which must not change the end."""
    try:
        return _report(stream, outcome)
    except CkptError as error:
        _LOG.warning("The run ends without a report: %s", error)
        return {}


def _report(stream: StreamHandle, outcome: Outcome) -> dict[str, Any]:
    execution = stream.catalog.executions.get(outcome.execution_id)
    taken = stream.catalog.history.of_execution(stream.stream_id, execution.execution_id, limit=SHOWN_SNAPSHOTS)
    ended_at_ms = execution.ended_at_ms or stream.catalog.now_ms()
    facts = {
        "end": f"{outcome.end.kind.name}: {without_secrets(outcome.end.reason)}",
        "started": utc_time(execution.started_at_ms),
        "ran for": rounded_duration(ended_at_ms - execution.started_at_ms),
        "started from": _origin(execution),
        "newest batch": (execution.progress or {}).get("batch_id", "none"),
        "snapshots": f"{taken.completed:,} completed, {size(taken.new_bytes)} written",
        "failed attempts": taken.failed,
    }
    rows = [
        (
            describe_snapshot(each),
            each.status.value if each.status is not SnapshotStatus.COMPLETED else "",
            *(size(each.full_bytes), size(each.incremental_bytes)),
            "-" if each.duration_ms is None else rounded_duration(each.duration_ms),
        )
        for each in taken.newest
    ]
    return {
        RUN_KEY: dg.MetadataValue.md(markdown_table(("", ""), facts.items())),
        SNAPSHOTS_KEY: dg.MetadataValue.md(markdown_table(("newest first", "", "size", "new", "took"), rows)),
    }


def _origin(execution: ExecutionRecord) -> str:
    recovery = execution.recovery or {}
    kind, batch_id = str(recovery.get("kind", "unknown")), recovery.get("to_batch")
    return kind if batch_id is None else f"{kind} after batch {batch_id}"
