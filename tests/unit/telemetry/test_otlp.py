"""OpenTelemetry export: what is sent, read again as a collector reads it; and that nothing of it is loaded where nobody asks for it."""

from __future__ import annotations

import gzip
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from atoll.telemetry import metrics as m
from atoll.telemetry.metrics import Metrics
from atoll.telemetry.otlp import Create, Export, Phase, wanted


class Collector(http.server.BaseHTTPRequestHandler):
    got: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.append((self.path, gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bytes]]]:
    got: list[tuple[str, bytes]] = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Collector,), {"got": got}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    yield got
    server.shutdown()
    thread.join()
    server.server_close()


def export(metrics: Metrics) -> Export:
    return Export(metrics, process="control", version="1.2.3", environ={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"})


def test_metrics_say_the_same_as_the_page(collector) -> None:
    metrics = Metrics()
    metrics.count(m.CREATES, "default", by=3)
    metrics.put(m.SANDBOXES, 2, "ready", "default")
    for value in (0.0001, 0.003, 99.0):
        metrics.observe(m.COMMIT_SECONDS, value)
    assert export(metrics).send_metrics()
    ((path, body),) = collector
    assert path == "/v1/metrics"
    (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
    attributes = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert {name: attributes[name] for name in ("service.name", "service.version", "deployment.environment")} == {
        "service.name": "atoll-control",
        "service.version": "1.2.3",
        "deployment.environment": "test",
    }
    found = {one.name: one for one in resource.scope_metrics[0].metrics}
    (created,) = found[m.CREATES.name].sum.data_points
    assert found[m.CREATES.name].sum.is_monotonic
    assert ({one.key: one.value.string_value for one in created.attributes}, created.as_double) == ({"class": "default"}, 3)
    assert found[m.SANDBOXES.name].gauge.data_points[0].as_double == 2
    (commits,) = found[m.COMMIT_SECONDS.name].histogram.data_points
    assert (commits.count, sum(commits.bucket_counts)) == (3, 3)
    assert list(commits.explicit_bounds) == list(m.COMMIT_SECONDS.buckets)
    assert len(commits.bucket_counts) == len(m.COMMIT_SECONDS.buckets) + 1
    assert commits.bucket_counts[0] == commits.bucket_counts[-1] == 1


def test_a_create_is_one_trace_with_its_phases(collector) -> None:
    sender = export(Metrics())
    phases = (Phase("placing", 100.0, 100.25), Phase("starting", 100.25, 101.5))
    sender.create(Create(100.0, 101.5, phases, {"atoll.class": "default"}))
    sender.create(Create(200.0, 203.0, (), {}, error="NO_CAPACITY"))
    assert sender.send_traces()
    assert sender.send_traces(), "nothing is left to send, and nothing is sent"
    ((path, body),) = collector
    assert path == "/v1/traces"
    spans = list(ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans)
    whole, placing, starting, failed = spans
    assert [one.name for one in spans] == ["sandbox.create", "sandbox.create.placing", "sandbox.create.starting", "sandbox.create"]
    assert {placing.parent_span_id, starting.parent_span_id} == {whole.span_id}
    assert whole.trace_id == placing.trace_id == starting.trace_id != failed.trace_id
    assert (starting.start_time_unix_nano, whole.end_time_unix_nano) == (100_250_000_000, 101_500_000_000)
    assert (failed.status.message, failed.status.code) == ("NO_CAPACITY", 2)


def test_a_collector_that_is_away_is_told_once_and_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    assert not export(Metrics()).send_metrics()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (False, False)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, (True, True)),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://x"}, (True, False)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, (False, True)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, (False, False)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}, (True, False)),
    ],
)
def test_the_environment_decides(environ: dict[str, str], expected: tuple[bool, bool]) -> None:
    assert wanted(environ) == expected


def test_nothing_of_it_is_loaded_where_nobody_asks_for_it() -> None:
    """FastAPI loads OpenTelemetry's small API by itself; what takes room is the SDK, its exporters, and what they bring along."""
    heavy = ("opentelemetry.sdk", "opentelemetry.exporter", "google", "requests")
    code = f"import sys, atoll.control.compose; print([name for name in sys.modules if name.startswith({heavy!r})])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
