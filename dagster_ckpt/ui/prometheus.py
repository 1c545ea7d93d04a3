"""The metrics of all streams in the format of Prometheus or OpenMetrics."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from dagster_ckpt.values.metrics import METRICS, Sample


def exposition(samples: Iterable[Sample], accept: str) -> tuple[bytes, str]:
    """Text and content type."""
    families = {
        metric: (CounterMetricFamily if metric.is_counter else GaugeMetricFamily)(
            metric.family, metric.description, labels=metric.labels
        )
        for metric in METRICS
    }
    for sample in samples:
        families[sample.metric].add_metric(list(sample.labels.values()), sample.value)
    encode, content_type = choose_encoder(accept)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(families.values()))
    return encode(registry), content_type


class _Collected(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families
