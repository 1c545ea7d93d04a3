"""The metrics of streams, read from the catalog alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from sqlalchemy import Connection, Row, Select, func, select

from dagster_ckpt.catalog.database import Records, as_dict
from dagster_ckpt.catalog.executions import newest_of
from dagster_ckpt.catalog.records import UNENDED, SnapshotStatus, watermark_ms_of
from dagster_ckpt.catalog.tables import deployment, executions, leases, metrics, snapshots, streams
from dagster_ckpt.values import metrics as declared
from dagster_ckpt.values.metrics import METRICS, Metric, Sample
from dagster_ckpt.values.redaction import without_secrets

_LONGEST_SOURCE = 200
_OF_EXECUTION = ("stream_id", "run_id", "status", "progress")
# Read from the stream and its last execution; the others are recorded by events, or counted.
_REPORTED = (
    declared.COUNTING_SINCE,
    *(declared.STATUS, declared.ROWS, declared.SOURCE_LAG, declared.BATCH_DURATION),
    *(declared.STATE_ROWS, declared.STATE_SIZE, declared.WATERMARK_DELAY),
)
_RECORDED = [
    (metric, kind, 0 if metric.is_counter or metric is declared.IN_PROGRESS else None)
    for metric in METRICS
    if metric not in _REPORTED
    for kind in metric.kinds or ("",)
]


class MetricRecords(Records):
    def read(self, stream_ids: Sequence[str] | None = None) -> list[Sample]:
        """Read the metrics of streams (None: all), in few queries whose cost does not grow with the history."""

        def of_these(query: Select[Any], column: Any = streams.c.stream_id) -> Select[Any]:
            return query if stream_ids is None else query.where(column.in_(stream_ids))

        is_in_progress = (snapshots.c.stream_id == streams.c.stream_id) & (
            snapshots.c.status == SnapshotStatus.IN_PROGRESS.value
        )
        attempts = select(streams.c.stream_id, snapshots.c.kind, func.count().label("number"))
        attempts = of_these(attempts.select_from(streams.join(snapshots, is_in_progress)))
        with self._database.reading() as connection:
            now_ms = self._database.now_ms(connection)
            since = _counting_since(connection, of_these(select(streams.c.stream_id, streams.c.created_at_ms)))
            values: dict[tuple[str, str, str], object] = {
                (row.stream_id, row.name, row.kind): row.value
                for row in connection.execute(of_these(select(metrics), metrics.c.stream_id))
            }
            for row in connection.execute(attempts.group_by(streams.c.stream_id, snapshots.c.kind)):
                values[row.stream_id, declared.IN_PROGRESS.name, str(row.kind).lower()] = row.number
            newest = of_these(newest_of().with_only_columns(*(executions.c[name] for name in _OF_EXECUTION)))
            last = {row.stream_id: row for row in connection.execute(newest)}
            in_force = select(leases.c.stream_id, leases.c.run_id).where(leases.c.expires_at_ms > now_ms)
            writers = {row.stream_id: row.run_id for row in connection.execute(of_these(in_force, leases.c.stream_id))}
        samples: list[Sample] = []
        for stream_id in sorted(since):
            samples.append(Sample(declared.COUNTING_SINCE, stream_id, since[stream_id] / 1000))
            samples += _recorded(stream_id, values)
            if stream_id in last:
                samples += _of_execution(last[stream_id], writers.get(stream_id), now_ms)
        return samples


def _counting_since(connection: Connection, known: Select[Any]) -> dict[str, int]:
    migrated_ms = connection.execute(select(deployment.c.counting_since_ms)).scalar_one_or_none() or 0
    return {row.stream_id: int(max(_number(row.created_at_ms) or 0, migrated_ms)) for row in connection.execute(known)}


def _recorded(stream_id: str, values: Mapping[tuple[str, str, str], object]) -> Iterator[Sample]:
    for metric, kind, at_first in _RECORDED:
        value = _number(values.get((stream_id, metric.name, kind), at_first))
        if value is not None:
            yield Sample(metric, stream_id, _in_unit(metric, value), kind)


def _of_execution(row: Row[Any], writer: str | None, now_ms: int) -> Iterator[Sample]:
    stream_id, status = row.stream_id, str(row.status).lower()
    if row.status in UNENDED and writer != row.run_id:
        status = "dead"
    yield Sample(declared.STATUS, stream_id, 1, status)
    progress = as_dict(row.progress)
    rows = _number(progress.get("input_rows"))
    if rows is not None:
        yield Sample(declared.ROWS, stream_id, rows)
    if status != "running":
        return
    watermark = progress.get("watermark")
    watermark_ms = watermark_ms_of(watermark) if isinstance(watermark, str) else None
    figures = {
        declared.BATCH_DURATION: progress.get("batch_ms"),
        declared.STATE_ROWS: progress.get("state_rows"),
        declared.STATE_SIZE: progress.get("state_memory"),
        declared.WATERMARK_DELAY: now_ms - watermark_ms if watermark_ms is not None else None,
    }
    for metric, figure in figures.items():
        value = _number(figure)
        if value is not None:
            yield Sample(metric, stream_id, _in_unit(metric, value))
    for source, behind in _lags(progress.get("sources")).items():
        yield Sample(declared.SOURCE_LAG, stream_id, behind, source)


def _lags(sources: object) -> dict[str, float]:
    """The lag of each source: the largest, if a query reads it several times."""
    lags: dict[str, float] = {}
    for source in sources if isinstance(sources, list) else ():
        behind = _number(source.get("behind")) if isinstance(source, dict) else None
        if behind is not None:
            name = without_secrets(str(source.get("source")))[:_LONGEST_SOURCE]
            lags[name] = max(behind, lags.get(name, 0))
    return lags


def _in_unit(metric: Metric, value: float) -> float:
    return value / 1000 if metric.unit == "s" else value


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) else None
