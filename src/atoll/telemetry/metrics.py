"""Metrics: what control counts, each with its help and its labels; docs/METRICS.md is made from these tables.

Theory of operation. A metric is declared once, in a table below; `Metrics` makes the ones of one process, in a registry of its own, and
`page()` writes them in Prometheus' text format. Every label has few values that we choose (a state, a code, a route's template): no id and
no client's word is ever a label, so that no tenant can make the page grow. Counting is in memory and takes a microsecond; what can be
asked of rows (how many sandboxes, what is used) is asked when somebody reads the page, and costs nothing otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric. `labels` are names and what their values are."""

    name: str
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    buckets: tuple[float, ...] = ()
    """Of a histogram; upper bounds in the metric's unit."""

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.labels)


_STATE: Final = ("state", "states of docs/STATES.md")
_CLASS: Final = ("class", "classes of the deployment document")
_CODE: Final = ("code", "codes of docs/ERRORS.md")
_REASON: Final = ("reason", "codes of docs/ERRORS.md")
_RESOURCE: Final = ("resource", "`cpu_millis`, `memory_mib`, `disk_mib`, `slots`")
_STATUS: Final = ("status", "`2xx`, `3xx`, `4xx`, `5xx`, or `none` when the client had gone")
_KEPT: Final = ("what", "`trees`: unpacked, `blobs`: as fetched, `quarantined`: not what they claimed, `pinned`: trees that stay")
_SECONDS: Final = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96)
_SHORT_SECONDS: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)

# counted
CREATES: Final = Spec("atoll_sandboxes_accepted_total", "Creates that were accepted.", (_CLASS,))
READY: Final = Spec("atoll_sandboxes_ready_total", "Sandboxes that became ready for the first time.", (_CLASS,))
RELEASES: Final = Spec("atoll_sandboxes_releases_total", "Decisions to end a sandbox.", (_REASON,))
ENDED: Final = Spec("atoll_sandboxes_ended_total", "Sandboxes of which nothing is left.", (("result", "`released`, `failed`"), _REASON))
CREATE_REFUSED: Final = Spec("atoll_creates_refused_total", "Creates that were answered with a failure.", (_CODE,))
PLACEMENT_REFUSED: Final = Spec(
    "atoll_placement_refusals_total",
    "Hosts that refused a sandbox, or were left out where no host could be found for one.",
    (("filter", "codes of docs/ERRORS.md and names of filters"),),
)
REPLACED: Final = Spec("atoll_placements_replaced_total", "Placements that failed before readiness and were replaced.", (_CODE,))
MOMENTS: Final = Spec(
    "atoll_moments_total",
    "What became of saved sandboxes in the artifact store.",
    (("what", "`uploaded`: it is there, `left`: its host gives its copy up, `taken_up`: a host goes on from it"),),
)
PASSES: Final = Spec(
    "atoll_reconcile_passes_total", "Stimuli that reconcile has met.", (("stimulus", "kinds of stimuli"), ("changed", "`yes`, `no`"))
)
COMMITS: Final = Spec("atoll_store_commits_total", "Transactions that were made durable.")
CHANGES: Final = Spec("atoll_store_changes_total", "Changes that were made durable; several share a transaction.")
STORE_ERRORS: Final = Spec("atoll_store_errors_total", "Changes that the database refused.", (_CODE,))
AGENT_CALLS: Final = Spec(
    "atoll_agent_calls_total", "Requests of agents.", (("call", "`enroll`, `poll`, `observe`, `payloads`, ... `other`"), _STATUS)
)
HTTP: Final = Spec(
    "atoll_http_requests_total",
    "Requests of clients.",
    (("route", "templates of paths; `other` for paths that do not exist"), ("method", "HTTP methods; `other`"), _STATUS),
)
EVENT_STREAMS: Final = Spec("atoll_event_streams", "Streams of events that are open.")
ALERTS_RAISED: Final = Spec("atoll_alerts_raised_total", "Alerts that this process has raised.", (("kind", "kinds of docs/RUNBOOK.md"),))
WARM_CLAIMS: Final = Spec(
    "atoll_warm_claims_total",
    "Creates of kinds that are kept warm.",
    (("result", "`claimed`: it took over a guest that was ready, `none`: there was none"),),
)
WARM_GIVEN_UP: Final = Spec("atoll_warm_given_up_total", "Guests made ahead that went because a create found no room.")

# measured
PHASES: Final = Spec(
    "atoll_create_phase_seconds",
    "How long creates took: until a host had granted the placement, from then on until the guest was ready, and both.",
    (("phase", "`placing`, `starting`, `total`"),),
    _SECONDS,
)
COMMIT_SECONDS: Final = Spec("atoll_store_commit_seconds", "How long transactions took, with what was done in them.", (), _SHORT_SECONDS)
HTTP_SECONDS: Final = Spec(
    "atoll_http_request_seconds",
    "How long requests of clients took. Waiting for readiness and open streams count.",
    (("route", "templates of paths; `other`"),),
    _SECONDS,
)

# looked at when the page is read
SANDBOXES: Final = Spec("atoll_sandboxes", "Living sandboxes.", (_STATE, _CLASS))
HOSTS: Final = Spec(
    "atoll_hosts",
    "Registered hosts.",
    (("admin", "`active`, `draining`, `disabled`"), ("health", "`unknown`, `healthy`, `suspect`, `lost`")),
)
CAPACITY: Final = Spec("atoll_capacity", "What hosts that are not disabled have registered, summed.", (_RESOURCE,))
USED: Final = Spec("atoll_used", "What placements on them hold, summed.", (_RESOURCE,))
ALERTS: Final = Spec("atoll_alerts", "Open alerts.", (("severity", "`info`, `warning`, `critical`"),))
IMAGE_BYTES: Final = Spec(
    "atoll_host_image_bytes",
    "What hosts keep of images, by their newest polls, summed over the deployment.",
    (("what", "`trees`: unpacked, `blobs`: as fetched"),),
)
IMAGE_ENTRIES: Final = Spec(
    "atoll_host_image_entries", "How many images and blobs hosts keep, by their newest polls, summed over the deployment.", (_KEPT,)
)
IMAGE_USES: Final = Spec(
    "atoll_host_image_uses",
    "Starts on hosts since their agents began, by their newest polls, summed over the deployment.",
    (("how", "`hit`: the image was ready, `fetched`: it was not"),),
)
WARM_GUESTS: Final = Spec("atoll_warm_guests", "Guests that are made ahead and nobody's yet.", (_STATE,))
WARM_SHORT: Final = Spec("atoll_warm_short", "How many more of them should be ready by the policies.")
WAITING: Final = Spec(
    "atoll_queue_length",
    "How many wait: `store` for a commit, `polls` are parked, `creates` for readiness, `edges` follow routes, `requests` are in flight.",
    (("queue", "`store`, `polls`, `creates`, `edges`, `requests`"),),
)
INFO: Final = Spec("atoll_control_info", "The version of control; always 1.", (("version", "the version"),))
START: Final = Spec("process_start_time_seconds", "Unix time at which the process started.")
MEMORY: Final = Spec("process_resident_memory_bytes", "Resident memory.")
CPU: Final = Spec("process_cpu_seconds_total", "CPU that the process has used.")

COUNTERS: Final = (
    CREATES, READY, RELEASES, ENDED, CREATE_REFUSED, PLACEMENT_REFUSED, REPLACED, MOMENTS, PASSES, COMMITS, CHANGES, STORE_ERRORS, AGENT_CALLS,
    HTTP, ALERTS_RAISED, WARM_CLAIMS, WARM_GIVEN_UP, CPU,
)  # fmt: skip
HISTOGRAMS: Final = (PHASES, COMMIT_SECONDS, HTTP_SECONDS)
GAUGES: Final = (
    SANDBOXES,
    HOSTS,
    CAPACITY,
    USED,
    ALERTS,
    IMAGE_BYTES,
    IMAGE_ENTRIES,
    IMAGE_USES,
    WARM_GUESTS,
    WARM_SHORT,
    WAITING,
    EVENT_STREAMS,
    INFO,
    START,
    MEMORY,
)


class Metrics:
    """The metrics of one process. For the event loop and for the store's threads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._counters = {
            spec.name: Counter(spec.name.removesuffix("_total"), spec.help, spec.label_names, registry=self.registry) for spec in COUNTERS
        }
        self._histograms = {
            spec.name: Histogram(spec.name, spec.help, spec.label_names, buckets=spec.buckets, registry=self.registry)
            for spec in HISTOGRAMS
        }
        self._gauges = {spec.name: Gauge(spec.name, spec.help, spec.label_names, registry=self.registry) for spec in GAUGES}

    def count(self, spec: Spec, *labels: str, by: float = 1) -> None:
        """One more, or `by`."""
        counter = self._counters[spec.name]
        (counter.labels(*labels) if labels else counter).inc(by)

    def observe(self, spec: Spec, value: float, *labels: str) -> None:
        """One more measurement. *Units*: the metric's."""
        histogram = self._histograms[spec.name]
        (histogram.labels(*labels) if labels else histogram).observe(value)

    def put(self, spec: Spec, value: float, *labels: str) -> None:
        """What a gauge shows."""
        gauge = self._gauges[spec.name]
        (gauge.labels(*labels) if labels else gauge).set(value)

    def add(self, spec: Spec, by: float) -> None:
        """Move a gauge."""
        self._gauges[spec.name].inc(by)

    def clear(self, *specs: Spec) -> None:
        """Forget what these gauges showed: what is not put again is not there any more."""
        for spec in specs:
            self._gauges[spec.name].clear()

    def total(self, spec: Spec, value: float) -> None:
        """What a counter shows that something else counts."""
        counter = self._counters[spec.name]
        counter.reset()
        counter.inc(value)

    def value(self, spec: Spec, *labels: str) -> float:
        """What is shown now; 0 where nothing was counted yet. Of a histogram, how many measurements."""
        sample = f"{spec.name}_count" if spec in HISTOGRAMS else spec.name
        return self.registry.get_sample_value(sample, dict(zip(spec.label_names, labels, strict=True))) or 0.0

    def page(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)
