"""Report a run through OpenTelemetry.

If the environment names an endpoint, the SDK is set up here, unless the program has done so.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, Observation

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.errors import CkptError
from dagster_ckpt.values.metrics import METRICS, PREFIX, Metric, Sample

_LOG = logging.getLogger(__name__)
_ENDPOINTS = tuple(f"OTEL_EXPORTER_OTLP_{each}ENDPOINT" for each in ("", "METRICS_", "TRACES_"))
# All metrics of one export come from the same read.
_ONE_EXPORT_S = 1.0
_FLUSH_MS = 5_000


class _Reported:
    def __init__(self) -> None:
        self.catalogs: dict[str, Catalog] = {}
        self._samples: list[Sample] = []
        self._read_at_s = float("-inf")

    def observe(self, metric: Metric, _options: CallbackOptions) -> Iterable[Observation]:
        if time.monotonic() - self._read_at_s > _ONE_EXPORT_S:
            self._samples, self._read_at_s = list(self._read()), time.monotonic()
        return [Observation(each.value, each.labels) for each in self._samples if each.metric is metric]

    def _read(self) -> Iterator[Sample]:
        for stream_id, catalog in list(self.catalogs.items()):
            try:
                yield from catalog.metrics.read([stream_id])
            except CkptError as error:
                _LOG.warning("The metrics of stream %s are not reported: %s", stream_id, error)


_REPORTED = _Reported()


@contextmanager
def reporting(catalog: Catalog, stream_id: str) -> Iterator[None]:
    set_up()
    _REPORTED.catalogs[stream_id] = catalog
    try:
        yield
    finally:
        _flush()
        _REPORTED.catalogs.pop(stream_id, None)


@cache
def set_up() -> None:
    if any(os.environ.get(name) for name in _ENDPOINTS) and os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true":
        _set_up_sdk()
    meter = metrics.get_meter(PREFIX)
    for metric in METRICS:
        create = meter.create_observable_counter if metric.is_counter else meter.create_observable_gauge
        create(metric.full_name, [partial(_REPORTED.observe, metric)], metric.unit, metric.description)


def _set_up_sdk() -> None:
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # noqa: PLC0415
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # noqa: PLC0415
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        _LOG.warning(
            "The environment names an endpoint of OpenTelemetry, but nothing is sent: the extra 'otel' is missing "
            "(%s). Install it: pip install 'dagster-ckpt[otel]'",
            error,
        )
        return
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: PREFIX}))
    # A provider of the program has a method that the API's own has not.
    if not hasattr(metrics.get_meter_provider(), "force_flush"):
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        metrics.set_meter_provider(MeterProvider([reader], resource))
    if not hasattr(trace.get_tracer_provider(), "force_flush"):
        spans = TracerProvider(resource=resource)
        spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(spans)


def _flush() -> None:
    for provider in (metrics.get_meter_provider(), trace.get_tracer_provider()):
        flush: Callable[[int], object] | None = getattr(provider, "force_flush", None)
        if flush is not None:
            try:
                flush(_FLUSH_MS)
            except Exception as error:  # noqa: BLE001 - a collector that is away must not hide how a run ended
                _LOG.warning("The last metrics and spans of a run were not sent: %s", error)
