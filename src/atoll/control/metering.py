"""Metering: what control counts as it happens, in the words of `telemetry/metrics.py`.

One per control process. The parts say what happened (a commit, a request, a refusal); which metric that is, and which labels it has, is
decided here only. A word that is not one of ours counts as `other`: labels never grow with what clients and guests say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from atoll.base.errors import Code
from atoll.domain import history
from atoll.planning.alerting import SLOW_S, StoreFacts
from atoll.planning.stimuli import Note, Stimulus
from atoll.store.facts import Committed
from atoll.telemetry import metrics as m
from atoll.telemetry.metrics import Metrics
from atoll.telemetry.otlp import Create, Export, Phase

OTHER: Final = "other"
_TAKEN_UP: Final = "taken_up"
_MOMENTS: Final[Mapping[str, str]] = {
    history.SANDBOX_UPLOADED: "uploaded",
    history.SANDBOX_HOST_LEFT: "left",
    history.SANDBOX_RESUMING: _TAKEN_UP,
}
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def code_label(code: object) -> str:
    """A stable code, or `other`."""
    text = str(code)
    return text if text in Code.__members__ else OTHER


def status_label(status: int) -> str:
    """The class of an HTTP status; `none`: nothing was sent."""
    return f"{status // 100}xx" if status else "none"


@dataclass(slots=True)
class Meter:
    """Counts. For the event loop; `stored` also for the store's threads."""

    metrics: Metrics = field(default_factory=Metrics)
    in_flight: int = 0
    """Requests of clients."""
    creating: int = 0
    """Creates that wait for readiness."""
    parked: int = 0
    """Requests of agents, of which nearly all are parked polls."""
    storing: int = 0
    """Changes that wait for their commit."""
    export: Export | None = None
    """Where creates leave their traces; None: nowhere."""
    _slowest_s: float = 0.0
    _slow: int = 0
    _refused: str | None = None

    def met(self, stimulus: Stimulus, *, changed: bool) -> None:
        """Reconcile has met a stimulus."""
        self.metrics.count(m.PASSES, type(stimulus).__name__.lower(), "yes" if changed else "no")

    def accepted(self, class_name: str) -> None:
        """A create was committed."""
        self.metrics.count(m.CREATES, class_name)

    def create_refused(self, code: object) -> None:
        """A create was answered with a failure."""
        self.metrics.count(m.CREATE_REFUSED, code_label(code))

    def left_out(self, hosts: Mapping[str, int]) -> None:
        """No host could be found for a sandbox: how many each filter left out."""
        for name, count in hosts.items():
            self.metrics.count(m.PLACEMENT_REFUSED, name, by=count)

    def committed(self, done: Committed, *, now: float) -> None:
        """A sandbox's change is durable. *Units*: wall seconds."""
        for note in done.notes:
            self._noted(note, done, now=now)
            what = _MOMENTS.get(note.type)
            if what is not None and (what != _TAKEN_UP or "placement_id" in note.data):
                self.metrics.count(m.MOMENTS, what)

    def _noted(self, note: Note, done: Committed, *, now: float) -> None:
        sandbox, placement = done.sandbox, done.placement
        match note.type:
            case history.SANDBOX_PLACED:
                self.metrics.observe(m.PHASES, max(0.0, now - sandbox.created_at), "placing")
            case history.SANDBOX_READY:
                self.metrics.count(m.READY, sandbox.spec.class_name)
                self.metrics.observe(m.PHASES, max(0.0, now - sandbox.created_at), "total")
                if placement is not None:
                    self.metrics.observe(m.PHASES, max(0.0, now - max(placement.created_at, sandbox.created_at)), "starting")
                self._trace(done, now=now)
            case history.SANDBOX_RELEASING:
                self.metrics.count(m.RELEASES, code_label(sandbox.reason))
            case history.SANDBOX_RELEASED | history.SANDBOX_FAILED:
                self.metrics.count(m.ENDED, sandbox.state.value, code_label(sandbox.reason))
                if sandbox.started_at is None:
                    self._trace(done, now=now)
            case history.SANDBOX_HOST_REFUSED:
                self.metrics.count(m.PLACEMENT_REFUSED, code_label(note.data.get("code")))
            case history.SANDBOX_REPLACED:
                self.metrics.count(m.REPLACED, code_label(note.data.get("reason")))
            case _:
                return

    def _trace(self, done: Committed, *, now: float) -> None:
        """A create is over: its guest is ready, or will never be."""
        if self.export is None:
            return
        sandbox, placement = done.sandbox, done.placement
        phases: tuple[Phase, ...] = ()
        if placement is not None:
            placed_at = min(now, max(placement.created_at, sandbox.created_at))
            phases = (Phase("placing", sandbox.created_at, placed_at), Phase("starting", placed_at, now))
        attributes = {
            "atoll.sandbox.id": sandbox.id,
            "atoll.class": sandbox.spec.class_name,
            "atoll.template": sandbox.spec.image_name,
            "atoll.isolation": sandbox.spec.isolation.value,
            "atoll.host.id": sandbox.host_id or "",
        }
        error = None if sandbox.started_at is not None else code_label(sandbox.reason)
        self.export.create(Create(sandbox.created_at, max(now, sandbox.created_at), phases, attributes, error))

    def answered(self, route: str, method: str, status: int, elapsed_s: float) -> None:
        """A client's request is done. `route` is a template of ours. *Units*: seconds."""
        self.metrics.count(m.HTTP, route, method if method in _METHODS else OTHER, status_label(status))
        self.metrics.observe(m.HTTP_SECONDS, elapsed_s, route)

    def agent_answered(self, call: str, status: int) -> None:
        """An agent's request is done."""
        self.metrics.count(m.AGENT_CALLS, call, status_label(status))

    def stored(self, changes: int, elapsed_s: float, refused: str | None = None) -> None:
        """The store has tried to make changes durable in one transaction; `refused`: the code with which it failed. *Units*: seconds."""
        self._refused = refused
        if refused is not None:
            self.metrics.count(m.STORE_ERRORS, code_label(refused), by=changes)
            return
        self.metrics.count(m.COMMITS)
        self.metrics.count(m.CHANGES, by=changes)
        self.metrics.observe(m.COMMIT_SECONDS, elapsed_s)
        self._slowest_s = max(self._slowest_s, elapsed_s)
        self._slow += elapsed_s > SLOW_S

    def store_facts(self, process: str) -> StoreFacts:
        """What was met at the store since this was asked last."""
        facts = StoreFacts(process, self._slowest_s, self._slow, self._refused)
        self._slowest_s, self._slow = 0.0, 0
        return facts
