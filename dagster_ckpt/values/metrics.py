"""Every metric of a stream, declared once, under names that follow OpenTelemetry and Flink.

The Prometheus endpoint, the exporter of a run, `docs/guides/metrics.md` and the checks of dashboard and alert rules are
derived from `METRICS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

PREFIX = "dagster_ckpt"

_UNITS = {"s": "seconds", "By": "bytes"}
_SNAPSHOTS = ("checkpoint", "savepoint")
STATUSES = ("starting", "running", "finished", "canceled", "failed", "suspended", "dead")


@dataclass(frozen=True)
class Metric:
    """A metric with the label `stream`, perhaps another `label` such as `source`; `unit` is in UCUM's notation."""

    name: str
    unit: str
    description: str
    is_counter: bool = False
    kinds: tuple[str, ...] = ()
    flink: str | None = None
    label: str | None = None

    @property
    def full_name(self) -> str:
        return f"{PREFIX}.{self.name}"

    @property
    def family(self) -> str:
        """Its name in Prometheus without a counter's `_total`."""
        return "_".join(filter(None, [PREFIX, self.name.replace(".", "_"), _UNITS.get(self.unit)]))

    @property
    def prometheus_name(self) -> str:
        return f"{self.family}_total" if self.is_counter else self.family

    @property
    def labels(self) -> tuple[str, ...]:
        return "stream", *(("kind",) if self.kinds else ()), *((self.label,) if self.label else ())


def _counter(
    name: str, unit: str, description: str, *, kinds: tuple[str, ...] = (), flink: str | None = None
) -> Metric:
    return Metric(name, unit, description, is_counter=True, kinds=kinds, flink=flink)


COUNTING_SINCE = Metric(
    "counting.since",
    "s",
    "Since when the counters of the stream count, since the epoch; `batch.rows` counts since the last start.",
)
COMPLETED = _counter(
    "snapshot.completed", "{snapshot}", "Completed snapshots.", kinds=_SNAPSHOTS, flink="numberOfCompletedCheckpoints"
)
FAILED = _counter(
    "snapshot.failed", "{snapshot}", "Failed attempts.", kinds=_SNAPSHOTS, flink="numberOfFailedCheckpoints"
)
IN_PROGRESS = Metric(
    "snapshot.in_progress",
    "{snapshot}",
    "Attempts in progress.",
    kinds=_SNAPSHOTS,
    flink="numberOfInProgressCheckpoints",
)
WRITTEN = _counter("snapshot.written", "By", "Bytes written for completed snapshots.", kinds=_SNAPSHOTS)
LAST_TIME = Metric(
    "snapshot.last.timestamp",
    "s",
    "When the last snapshot was completed or renewed, since the epoch.",
    kinds=_SNAPSHOTS,
    flink="lastCompletedCheckpointId, as a time",
)
LAST_DURATION = Metric(
    "snapshot.last.duration", "s", "Duration of the last snapshot.", kinds=_SNAPSHOTS, flink="lastCheckpointDuration"
)
LAST_ALIGNMENT = Metric(
    "snapshot.last.alignment",
    "s",
    "How long the last snapshot waited for its batch boundary, as a part of its duration.",
    kinds=_SNAPSHOTS,
    flink="checkpointAlignmentTime",
)
LAST_SIZE = Metric(
    "snapshot.last.size",
    "By",
    "Bytes that a restore of the last snapshot reads.",
    kinds=_SNAPSHOTS,
    flink="lastCheckpointFullSize",
)
LAST_NEW_SIZE = Metric(
    "snapshot.last.new_size",
    "By",
    "Bytes written for the last snapshot.",
    kinds=_SNAPSHOTS,
    flink="lastCheckpointSize",
)
DELETED = _counter("retention.deleted", "{snapshot}", "Deleted snapshots.")
FREED = _counter("retention.freed", "By", "Bytes freed by deleted snapshots, as far as the storage reports them.")
STATUS = Metric(
    "stream.status",
    "1",
    "1 for the status of the last execution, no sample for others; `dead`: its process no longer holds the lease.",
    kinds=STATUSES,
    flink="<jobStatus>State",
)
RESTARTS = _counter(
    "stream.restarts", "{restart}", "Automatic restarts.", kinds=("in_place", "new_run"), flink="numRestarts"
)
FAILURES = _counter("stream.failures", "{execution}", "Failed executions.")
TERMINAL_FAILURES = _counter("stream.given_up", "{execution}", "Failures that no restart follows.")
RECOVERY_TIME = _counter(
    "recovery.time", "s", "Time from the last sign of life of a failed execution until its successor ran."
)
LAST_RECOVERY = Metric("recovery.last.duration", "s", "Duration of the last such recovery.", flink="restartingTime")
LEASES_LOST = _counter(
    "lease.lost",
    "{lease}",
    "Leases taken over: their holder had ended, or did not renew it and is not proven to have ended (`unproven`).",
    kinds=("ended", "unproven"),
)
SOURCE_LAG = Metric(
    "source.lag",
    "{record}",
    "Records that a Kafka source had not read at the last batch.",
    flink="pendingRecords",
    label="source",
)
BATCH_DURATION = Metric("batch.duration", "s", "Duration of the last batch.")
ROWS = _counter(
    "batch.rows", "{row}", "Input rows of the last execution; starts again at 0 with the next.", flink="numRecordsIn"
)
STATE_ROWS = Metric("state.rows", "{row}", "Rows in all state stores.")
STATE_SIZE = Metric("state.memory", "By", "Memory used by all state stores, as Spark reports it.")
WATERMARK_DELAY = Metric(
    "watermark.delay", "s", "Time by which the watermark is behind the clock.", flink="currentOutputWatermark"
)

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


class Sample(NamedTuple):
    """A value of a metric; `kind` is the value of its label besides `stream`, or empty."""

    metric: Metric
    stream_id: str
    value: float
    kind: str = ""

    @property
    def labels(self) -> dict[str, str]:
        return dict(zip(self.metric.labels, (self.stream_id, self.kind), strict=False))


Change = tuple[Metric, str, int]


def as_table() -> Iterator[str]:
    yield "| in Prometheus | in OpenTelemetry | labels | meaning | in Flink |"
    yield "|---|---|---|---|---|"
    for metric in METRICS:
        labels = ", ".join(
            f"`kind`: {', '.join(metric.kinds)}" if label == "kind" else f"`{label}`"
            for label in metric.labels
            if label != "stream"
        )
        flink = f"`{metric.flink}`" if metric.flink and "," not in metric.flink else metric.flink or ""
        cells = (f"`{metric.prometheus_name}`", f"`{metric.full_name}`", labels, metric.description, flink)
        yield f"| {' | '.join(cells)} |".replace("|  |", "| |")
