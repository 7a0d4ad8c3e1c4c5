"""What counts as what: each thing that happens under its own metric, and no word of a client as a label."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.control.metering import Meter, code_label, status_label
from atoll.domain import history
from atoll.domain.placement import Placement
from atoll.domain.sandbox import Sandbox, State
from atoll.planning.alerting import StoreFacts
from atoll.planning.stimuli import Note, Tick
from atoll.store.facts import Committed
from atoll.telemetry import metrics as m
from atoll.telemetry.otlp import Export
from tests.builders import NOW, placement, sandbox


def told(meter: Meter, kind: str, one: Sandbox, place: Placement | None = None, *, at: float = NOW, **data: str) -> None:
    meter.committed(Committed(one, place, changed=True, notes=(Note(kind, data),)), now=at)


def test_a_create_in_its_phases() -> None:
    meter, one = Meter(), sandbox(started_at=NOW + 3)
    place = placement(one, created_at=NOW + 1)
    told(meter, history.SANDBOX_PLACED, one, place, at=NOW + 1)
    told(meter, history.SANDBOX_READY, replace(one, state=State.READY), place, at=NOW + 3)
    found = meter.metrics.registry.get_sample_value
    assert [found("atoll_create_phase_seconds_sum", {"phase": phase}) for phase in ("placing", "starting", "total")] == [1, 2, 3]
    assert meter.metrics.value(m.READY, "default") == 1


@pytest.mark.parametrize("back_s", [-5.0, -1e6])
def test_a_clock_that_was_set_back_counts_no_negative_time(back_s: float) -> None:
    meter, one = Meter(), sandbox()
    told(meter, history.SANDBOX_READY, one, placement(one), at=NOW + back_s)
    assert meter.metrics.registry.get_sample_value("atoll_create_phase_seconds_sum", {"phase": "total"}) == 0


def test_ends_by_result_and_reason() -> None:
    meter = Meter()
    told(meter, history.SANDBOX_RELEASING, sandbox(state=State.RELEASING, reason="END_REACHED"))
    told(meter, history.SANDBOX_RELEASED, sandbox(state=State.RELEASED, reason="END_REACHED", started_at=NOW))
    told(meter, history.SANDBOX_FAILED, sandbox(state=State.FAILED, reason="made up by a guest"))
    assert meter.metrics.value(m.RELEASES, "END_REACHED") == 1
    assert meter.metrics.value(m.ENDED, "released", "END_REACHED") == 1
    assert meter.metrics.value(m.ENDED, "failed", "other") == 1


def test_refusals_by_filter() -> None:
    meter = Meter()
    meter.left_out({"HOST_CHECK_FAILED": 1, "INSUFFICIENT_CPU": 1})
    told(meter, history.SANDBOX_HOST_REFUSED, sandbox(), code="INSUFFICIENT_CPU")
    assert meter.metrics.value(m.PLACEMENT_REFUSED, "HOST_CHECK_FAILED") == 1
    assert meter.metrics.value(m.PLACEMENT_REFUSED, "INSUFFICIENT_CPU") == 2


def test_passes_say_whether_anything_changed() -> None:
    meter = Meter()
    meter.met(Tick(), changed=False)
    meter.met(Tick(), changed=True)
    assert (meter.metrics.value(m.PASSES, "tick", "no"), meter.metrics.value(m.PASSES, "tick", "yes")) == (1, 1)


def test_the_store_is_heard_and_judged_once() -> None:
    meter = Meter()
    meter.stored(3, 0.7)
    meter.stored(1, 0.1)
    assert (meter.metrics.value(m.COMMITS), meter.metrics.value(m.CHANGES)) == (2, 4)
    assert meter.store_facts("me") == StoreFacts("me", slowest_s=0.7, slow=1)
    assert meter.store_facts("me") == StoreFacts("me")
    meter.stored(2, 0.1, "STORE_FULL")
    assert meter.store_facts("me").refused == "STORE_FULL"
    assert meter.store_facts("me").refused == "STORE_FULL", "it refuses until it has taken something"
    meter.stored(1, 0.1)
    assert meter.store_facts("me").refused is None
    assert meter.metrics.value(m.STORE_ERRORS, "STORE_FULL") == 2


def test_labels_are_ours() -> None:
    meter = Meter()
    meter.answered("/v1/sandboxes", "BREW", 0, 0.1)
    assert meter.metrics.value(m.HTTP, "/v1/sandboxes", "other", "none") == 1
    assert [status_label(status) for status in (200, 301, 404, 503)] == ["2xx", "3xx", "4xx", "5xx"]
    assert [code_label(code) for code in ("NO_CAPACITY", "no_capacity", None, "")] == ["NO_CAPACITY", "other", "other", "other"]


def test_creates_leave_a_trace_where_somebody_wants_it() -> None:
    meter = Meter()
    export = Export(meter.metrics, process="control", version="1", environ={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"})
    meter.export = export
    ready = sandbox(started_at=NOW + 2, host_id="hst_a", metadata={"who": "canary"})
    told(meter, history.SANDBOX_READY, ready, placement(ready, created_at=NOW + 1), at=NOW + 2)
    told(meter, history.SANDBOX_FAILED, sandbox(state=State.FAILED, reason="NO_CAPACITY"), at=NOW + 9)
    told(meter, history.SANDBOX_RELEASED, ready, at=NOW + 99)
    first, second = export._creates
    assert [(phase.name, phase.began - NOW, phase.ended - NOW) for phase in first.phases] == [("placing", 0, 1), ("starting", 1, 2)]
    assert (first.error, second.error, second.ended - NOW) == (None, "NO_CAPACITY", 9)
    assert "canary" not in str(first)
