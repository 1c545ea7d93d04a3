"""What one batch did, as a frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class QueryProgress:
    """One report of a streaming query (`StreamingQueryProgress`), sent after the batch's commit.

    Attributes:
        batch_id: The batch.
        run_id: Id of the query's run; a restart has another one.
        timestamp: Begin of the trigger, ISO-8601 in UTC.
        input_rows: Rows read.
        state_rows: Rows in all state stores after it.
        watermark: Event-time watermark, ISO-8601, or None where the query has none.
        sinks: What Spark calls the sinks.
        duration_ms: How long the batch took.
        ran: False where Spark only reports that there was nothing to do.
    """

    batch_id: int
    run_id: str
    timestamp: str
    input_rows: int
    state_rows: int
    watermark: str | None
    sinks: tuple[str, ...]
    duration_ms: int
    ran: bool

    @staticmethod
    def of(report: Mapping[str, Any]) -> QueryProgress:
        """Read the JSON form of a report."""
        durations = report.get("durationMs") or {}
        sink = (report.get("sink") or {}).get("description")
        return QueryProgress(
            batch_id=int(report["batchId"]),
            run_id=str(report["runId"]),
            timestamp=str(report["timestamp"]),
            input_rows=max(0, int(report.get("numInputRows") or 0)),
            state_rows=sum(int(operator["numRowsTotal"]) for operator in report.get("stateOperators") or []),
            watermark=(report.get("eventTime") or {}).get("watermark"),
            sinks=(str(sink),) if sink else (),
            duration_ms=int(report.get("batchDuration") or 0),
            ran="addBatch" in durations,
        )
