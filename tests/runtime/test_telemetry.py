"""What a run sends through OpenTelemetry: metrics as the catalog has them, and spans with their phases."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dagster_ckpt.values.metrics import METRICS
from dagster_ckpt.values.modes import SnapshotKind
from dagster_ckpt.values.tracing import PhasedSpan, span
from tests.runtime.telemetry_program import live
from tests.support.rewind_history import History
from tests.support.taken_snapshot import taken

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [each for each in spans.get_finished_spans() if each.name == f"dagster_ckpt.{name}"]


def phases(spans: InMemorySpanExporter, parent: ReadableSpan) -> list[str]:
    its_own = [
        each
        for each in spans.get_finished_spans()
        if each.parent is not None and each.parent.span_id == parent.context.span_id
    ]
    its_own.sort(key=lambda each: each.start_time or 0)
    return [each.name.removeprefix("dagster_ckpt.") for each in its_own]


def test_each_attempt_and_start_is_a_span_with_its_phases(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    live(tmp_path)

    [start] = named(spans, "start")
    assert phases(spans, start) == ["facts", "plan", "check", "prepare", "start_query"]
    first, failed, last = named(spans, "checkpoint")
    [savepoint] = named(spans, "savepoint")
    for each in (first, savepoint, last):
        assert phases(spans, each) == ["alignment", "cut", "write", "record"]
        assert each.status.is_unset
    assert phases(spans, failed) == ["alignment", "cut"]
    assert failed.status.description == "IO_EXCEPTION: the disk is full"
    assert last.attributes is not None
    said = {name.removeprefix("dagster_ckpt."): value for name, value in last.attributes.items()}
    assert (said["stream"], said["number"], said["batch"], said["trigger"]) == ("orders", 4, 1, "MANUAL")


def test_a_rewind_and_a_restore_are_spans_with_their_phases(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    history = History(tmp_path)
    checkpoint = taken(history.shelf, SnapshotKind.CHECKPOINT)
    history.start("batch-5", accept_loss=True)
    [rewind] = named(spans, "rewind")
    assert phases(spans, rewind) == ["write_files", "roll_back_sinks"]
    history.start(checkpoint.reference, accept_loss=True)
    [restore] = named(spans, "restore")
    assert phases(spans, restore) == ["write_files", "roll_back_sinks"]
    history.close()


def test_a_failed_step_is_described_without_secrets(spans: InMemorySpanExporter) -> None:
    with pytest.raises(OSError, match="s3"), span("restore", stream="orders", batch=None):
        raise OSError("s3://key:very-secret@bucket is away")
    [failed] = named(spans, "restore")
    assert failed.attributes == {"dagster_ckpt.stream": "orders"}
    assert (failed.status.description or "").startswith("OSError: s3://")
    assert "very-secret" not in failed.to_json()


def test_nothing_changes_a_span_after_its_end(spans: InMemorySpanExporter) -> None:
    attempt = PhasedSpan("checkpoint")
    attempt.phase("alignment")
    attempt.end("aborted")
    attempt.phase("cut")
    attempt.end()
    assert [each.name for each in spans.get_finished_spans()] == ["dagster_ckpt.alignment", "dagster_ckpt.checkpoint"]
    assert all(each.status.description == "aborted" for each in spans.get_finished_spans())


@dataclass
class Collector:
    """Decodes what is sent to it, over HTTP."""

    address: str = ""
    metrics: dict[str, list[Any]] = field(default_factory=dict)
    spans: list[str] = field(default_factory=list)
    services: set[str] = field(default_factory=set)

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/metrics":
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                self._note(resource)
                for metric in (each for scope in resource.scope_metrics for each in scope.metrics):
                    self.metrics[metric.name] = [*(metric.sum if metric.HasField("sum") else metric.gauge).data_points]
        elif path == "/v1/traces":
            for of_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
                self._note(of_spans)
                self.spans += [each.name for scope in of_spans.scope_spans for each in scope.spans]

    def _note(self, sent: Any) -> None:
        self.services |= {each.value.string_value for each in sent.resource.attributes if each.key == "service.name"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield collector
    server.shutdown()
    thread.join()
    server.server_close()


def run_program(tmp_path: Path, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.telemetry_program", str(tmp_path)],
        cwd=REPOSITORY,
        env={**inherited, "OTEL_EXPORTER_OTLP_COMPRESSION": "none", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "ended: CANCEL_REQUESTED" in done.stdout, done.stderr
    return done.stderr


def test_a_run_sends_its_metrics_and_spans_to_the_endpoint_of_its_environment(
    tmp_path: Path, collector: Collector
) -> None:
    run_program(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=collector.address)
    assert collector.services == {"dagster_ckpt"}
    assert {"dagster_ckpt.start", "dagster_ckpt.checkpoint", "dagster_ckpt.savepoint"} <= set(collector.spans)
    assert set(collector.metrics) <= {metric.full_name for metric in METRICS}
    completed = {
        point.attributes[-1].value.string_value: point.as_double or point.as_int
        for point in collector.metrics["dagster_ckpt.snapshot.completed"]
    }
    assert completed == {"checkpoint": 2, "savepoint": 1}
    [ended] = collector.metrics["dagster_ckpt.stream.status"]
    assert {each.key: each.value.string_value for each in ended.attributes} == {"stream": "orders", "kind": "canceled"}


def test_a_collector_that_is_away_changes_nothing_in_a_run(tmp_path: Path) -> None:
    run_program(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", OTEL_EXPORTER_OTLP_TIMEOUT="1")
