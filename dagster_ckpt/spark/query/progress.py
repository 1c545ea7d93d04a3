"""Progress of a query: the report of one batch as a frozen value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dagster_ckpt.spark.query.output import NamedOutput, qualified


@dataclass(frozen=True)
class SourceProgress:
    """Progress of one source in a batch.

    Attributes:
        source: Spark's name for it, such as `KafkaV2[Subscribe[orders]]`.
        behind: Number of records between the read offset and the source's newest; None if the
            source does not report both.
        read_up_to: Kafka's offsets up to which the batch has read, as their JSON; None for other
            sources.
    """

    source: str
    behind: int | None
    read_up_to: str | None

    @staticmethod
    def of(report: Mapping[str, Any]) -> SourceProgress:
        """Parse the JSON form of a source's report."""
        read, newest = _offset(report.get("endOffset")), _offset(report.get("latestOffset"))
        return SourceProgress(
            source=str(report.get("description")),
            behind=_records_between(read, newest),
            read_up_to=json.dumps(read) if _is_kafka(read) else None,
        )


@dataclass(frozen=True)
class QueryProgress:
    """One report of a streaming query (`StreamingQueryProgress`), sent after the batch's commit.

    Attributes:
        batch_id: The batch.
        run_id: Id of the query's run; a restart has another one.
        timestamp: Start of the trigger, ISO-8601 in UTC.
        input_rows: Rows read.
        state_rows: Rows in all state stores after the batch.
        watermark: Event-time watermark, ISO-8601, or None if the query has none.
        sinks: Spark's names of the sinks.
        duration_ms: Duration of the batch.
        ran: False if Spark only reports that there was nothing to do.
        sources: The sources, with their lag if they report it.
        rows_per_second: Rows that the batch processed per second, or None.
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
    sources: tuple[SourceProgress, ...] = ()
    rows_per_second: float | None = None

    @staticmethod
    def of(report: Mapping[str, Any], output: NamedOutput | None = None) -> QueryProgress:
        """Parse the JSON form of a report.

        Args:
            report: The report.
            output: Where the query writes: Spark's name for the sink may not say it. None if unknown.
        """
        durations = report.get("durationMs") or {}
        sink = (report.get("sink") or {}).get("description")
        return QueryProgress(
            batch_id=int(report["batchId"]),
            run_id=str(report["runId"]),
            timestamp=str(report["timestamp"]),
            input_rows=max(0, int(report.get("numInputRows") or 0)),
            state_rows=sum(int(operator["numRowsTotal"]) for operator in report.get("stateOperators") or []),
            watermark=(report.get("eventTime") or {}).get("watermark"),
            sinks=(qualified(str(sink), output),) if sink else (),
            duration_ms=int(report.get("batchDuration") or 0),
            ran="addBatch" in durations,
            sources=tuple(SourceProgress.of(source) for source in report.get("sources") or []),
            rows_per_second=_speed(report.get("processedRowsPerSecond")),
        )


def _offset(offset: Any) -> Any:
    """An offset as a value: Spark writes JSON offsets as JSON, others as text, unknown ones as null."""
    try:
        return json.loads(offset) if isinstance(offset, str) else offset
    except ValueError:
        return None


def _is_kafka(offset: Any) -> bool:
    return (
        isinstance(offset, dict)
        and bool(offset)
        and all(
            isinstance(partitions, dict) and all(type(each) is int for each in partitions.values())
            for partitions in offset.values()
        )
    )


def _records_between(read: Any, newest: Any) -> int | None:
    if _is_kafka(read) and _is_kafka(newest):
        behind = 0
        for topic, partitions in newest.items():
            for partition, offset in partitions.items():
                behind += max(0, offset - read.get(topic, {}).get(partition, 0))
        return behind
    return None


def _speed(value: Any) -> float | None:
    # For an idle query, Spark writes NaN or omits the value.
    return float(value) if isinstance(value, int | float) and 0 < value < float("inf") else None
