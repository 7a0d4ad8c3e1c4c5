"""The registry and its page: parsed again by Prometheus' own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from atoll.telemetry import metrics as m
from atoll.telemetry import process
from atoll.telemetry.metrics import Metrics


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.page().decode())
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


def test_every_metric_is_on_the_page_under_its_name() -> None:
    metrics = Metrics()
    for spec in m.COUNTERS:
        metrics.count(spec, *("x" for _ in spec.labels))
    for spec in m.GAUGES:
        metrics.put(spec, 7, *("x" for _ in spec.labels))
    for spec in m.HISTOGRAMS:
        metrics.observe(spec, 0.03, *("x" for _ in spec.labels))
    found = samples(metrics)
    for spec in (*m.COUNTERS, *m.GAUGES):
        labels = tuple(sorted((name, "x") for name in spec.label_names))
        assert found[spec.name, labels] == (7 if spec in m.GAUGES else 1), spec.name
    for spec in m.HISTOGRAMS:
        labels = tuple(sorted((name, "x") for name in spec.label_names))
        assert found[f"{spec.name}_count", labels] == 1


def test_two_processes_share_nothing() -> None:
    one, two = Metrics(), Metrics()
    one.count(m.COMMITS, by=3)
    assert (one.value(m.COMMITS), two.value(m.COMMITS)) == (3, 0)


def test_what_is_not_put_again_is_gone() -> None:
    metrics = Metrics()
    metrics.put(m.SANDBOXES, 5, "ready", "default")
    metrics.clear(m.SANDBOXES)
    metrics.put(m.SANDBOXES, 1, "pending", "default")
    assert {labels for name, labels in samples(metrics) if name == m.SANDBOXES.name} == {(("class", "default"), ("state", "pending"))}


def test_a_counter_that_something_else_counts_only_follows_it() -> None:
    metrics = Metrics()
    metrics.total(m.CPU, 12.5)
    metrics.total(m.CPU, 13.0)
    assert metrics.value(m.CPU) == 13.0


def test_what_a_process_says_of_itself() -> None:
    metrics = Metrics()
    process.look(metrics, version="1.2.3")
    assert metrics.value(m.INFO, "1.2.3") == 1
    assert metrics.value(m.MEMORY) > 10 << 20
    assert metrics.value(m.CPU) > 0
    assert metrics.value(m.START) > 1_600_000_000
