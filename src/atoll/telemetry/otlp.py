"""OpenTelemetry: control's metrics and the traces of creates, by OTLP over HTTP, where the environment asks for it.

Theory of operation. Metrics are counted once, in `metrics.py`; every so often what stands there is sent as it is, so that both ways of
reading say the same. A create's trace is made when it is over, from the times that are on record: nothing is measured twice, and nothing
of this is in the create's way. The packages are only loaded when there is somewhere to send to: they take 15 MiB. What cannot be sent is
told once and forgotten: telemetry never holds anything up.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from atoll.telemetry import events
from atoll.telemetry.log import get_logger
from atoll.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricsData

LOG = get_logger()

ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
METRICS_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
TRACES_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
INTERVAL: Final = "OTEL_METRIC_EXPORT_INTERVAL"
_INTERVAL_MS: Final = 60_000
_SPANS_EVERY_S: Final = 5.0
SPANS_MAX: Final = 2000
"""Creates that wait to be sent; more are dropped."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a create. *Units*: wall seconds."""

    name: str
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Create:
    """A create that is over, for its trace. `attributes` hold no secret."""

    began: float
    ended: float
    phases: tuple[Phase, ...]
    attributes: Mapping[str, str]
    error: str | None = None


def wanted(environ: Mapping[str, str]) -> tuple[bool, bool]:
    """Whether metrics and traces have somewhere to go. Source: OpenTelemetry's specification of its environment variables."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False, False
    common = bool(environ.get(ENDPOINT))
    return (
        (common or bool(environ.get(METRICS_ENDPOINT))) and environ.get("OTEL_METRICS_EXPORTER", "otlp") != "none",
        (common or bool(environ.get(TRACES_ENDPOINT))) and environ.get("OTEL_TRACES_EXPORTER", "otlp") != "none",
    )


class Export:
    """Sends. `create` may be called by anybody at any time; `run` does the rest."""

    def __init__(self, metrics: Metrics, *, process: str, version: str, environ: Mapping[str, str]) -> None:
        self._metrics = metrics
        self._process = process
        self._version = version
        self._environ = environ
        self.with_metrics, self.with_traces = wanted(environ)
        self._creates: deque[Create] = deque(maxlen=SPANS_MAX)
        self._failed = False

    @property
    def on(self) -> bool:
        return self.with_metrics or self.with_traces

    def create(self, one: Create) -> None:
        """Let this create have a trace."""
        if self.with_traces:
            self._creates.append(one)

    async def run(self) -> None:
        """Send until cancelled; once more at the end."""
        loops = []
        if self.with_metrics:
            loops.append(self._every(self._interval_s(), self.send_metrics))
        if self.with_traces:
            loops.append(self._every(_SPANS_EVERY_S, self.send_traces))
        await asyncio.gather(*loops)

    async def _every(self, pause_s: float, send: Any) -> None:
        while True:
            try:
                await asyncio.sleep(pause_s)
            except asyncio.CancelledError:
                # A thread of its own: the process ends, and does not wait for a collector that hangs.
                threading.Thread(target=send, daemon=True).start()
                raise
            await asyncio.to_thread(send)

    def _interval_s(self) -> float:
        try:
            return max(1.0, float(self._environ.get(INTERVAL, _INTERVAL_MS)) / 1000)
        except ValueError:
            return _INTERVAL_MS / 1000

    def send_metrics(self) -> bool:
        """Send what stands there now; whether it was taken. Blocking."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import MetricExportResult

        exporter = OTLPMetricExporter()
        try:
            return self._told("metrics", sent=exporter.export(data_of(self._metrics, self._resource())) is MetricExportResult.SUCCESS)
        finally:
            exporter.shutdown()

    def send_traces(self) -> bool:
        """Send the creates that are over; whether they were taken. Blocking."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult

        creates = [self._creates.popleft() for _ in range(len(self._creates))]
        if not creates:
            return True
        exporter = OTLPSpanExporter()
        try:
            return self._told("traces", sent=exporter.export(spans_of(creates, self._resource())) is SpanExportResult.SUCCESS)
        finally:
            exporter.shutdown()  # type: ignore[no-untyped-call]

    def _told(self, what: str, *, sent: bool) -> bool:
        if not sent and not self._failed:
            LOG.warning(events.TELEMETRY_NOT_SENT, what=what)
        self._failed = not sent
        return sent

    def _resource(self) -> Any:
        from opentelemetry.sdk.resources import Resource

        return Resource.create({"service.name": f"atoll-{self._process}", "service.version": self._version})


def data_of(metrics: Metrics, resource: Any) -> MetricsData:
    """What stands in the registry, in OpenTelemetry's form."""
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    now_ns = time.time_ns()
    found = [made for family in metrics.registry.collect() if (made := _metric(family, now_ns)) is not None]
    scope = ScopeMetrics(InstrumentationScope("atoll"), found, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _metric(family: Any, now_ns: int) -> Any:
    from opentelemetry.sdk.metrics.export import AggregationTemporality, Gauge, Metric, NumberDataPoint, Sum

    if family.type == "histogram":
        return _histogram(family, now_ns)
    name = f"{family.name}_total" if family.type == "counter" else family.name
    samples = [sample for sample in family.samples if sample.name == name]
    if not samples:
        return None
    points = [NumberDataPoint(sample.labels, 0, now_ns, sample.value) for sample in samples]
    data = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True) if family.type == "counter" else Gauge(points)
    return Metric(name, family.documentation, "", data)


def _histogram(family: Any, now_ns: int) -> Any:
    from opentelemetry.sdk.metrics.export import AggregationTemporality, Histogram, HistogramDataPoint, Metric

    grouped: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        one = grouped.setdefault(tuple(sorted(labels.items())), {"labels": labels, "buckets": [], "sum": 0.0, "count": 0})
        if sample.name.endswith("_bucket"):
            one["buckets"].append((float(sample.labels["le"]), int(sample.value)))
        elif sample.name.endswith("_sum"):
            one["sum"] = sample.value
        elif sample.name.endswith("_count"):
            one["count"] = int(sample.value)
    points = []
    for one in grouped.values():
        bounds = [bound for bound, _ in one["buckets"] if bound != float("inf")]
        totals = [0, *(count for _, count in one["buckets"])]
        counts = [after - before for before, after in itertools.pairwise(totals)]
        points.append(HistogramDataPoint(one["labels"], 0, now_ns, one["count"], one["sum"], counts, bounds, float("nan"), float("nan")))
    return Metric(family.name, family.documentation, "s", Histogram(points, AggregationTemporality.CUMULATIVE)) if points else None


def spans_of(creates: Iterable[Create], resource: Any) -> list[Any]:
    """One trace for each create: the whole, and its phases below it."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    ids, scope, spans = RandomIdGenerator(), InstrumentationScope("atoll"), []
    for create in creates:
        trace_id = ids.generate_trace_id()

        def context(trace_id: int = trace_id) -> SpanContext:
            return SpanContext(trace_id, ids.generate_span_id(), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

        whole = context()
        status = Status(StatusCode.ERROR, create.error) if create.error else Status(StatusCode.OK)
        common: dict[str, Any] = {"resource": resource, "instrumentation_scope": scope}
        spans.append(
            ReadableSpan(
                "sandbox.create",
                whole,
                attributes=dict(create.attributes),
                kind=SpanKind.SERVER,
                status=status,
                start_time=_ns(create.began),
                end_time=_ns(create.ended),
                **common,
            )
        )
        spans.extend(
            ReadableSpan(
                f"sandbox.create.{phase.name}",
                context(),
                parent=whole,
                kind=SpanKind.INTERNAL,
                status=Status(StatusCode.OK),
                start_time=_ns(phase.began),
                end_time=_ns(phase.ended),
                **common,
            )
            for phase in create.phases
        )
    return spans


def _ns(at: float) -> int:
    return int(at * 1e9)
