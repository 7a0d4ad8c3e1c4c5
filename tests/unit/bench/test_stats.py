from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import report, run
from bench.findings import Finding, Verdict
from bench.parts import PARTS
from bench.stats import Sample, figure, paired, quantile, ratio

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200)


def test_ratios_are_taken_pair_by_pair() -> None:
    assert ratio([2.0, 30.0, 400.0], [1.0, 10.0, 100.0]) == pytest.approx(3.0)
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0])


@given(VALUES)
def test_the_median_is_the_median(values: list[float]) -> None:
    assert quantile(values, 0.5) == pytest.approx(statistics.median(values))
    assert quantile(values, 0.0) == min(values)
    assert quantile(values, 1.0) == max(values)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=200))
def test_quantiles_are_those_of_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    sample = Sample(values)
    assert sample.p95 == pytest.approx(cuts[94])
    assert sample.p99 == pytest.approx(cuts[98])


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 1.1), ([1.0], -0.1)])
def test_there_is_no_quantile_of_nothing(values: list[float], share: float) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        quantile(values, share)


@pytest.mark.parametrize(
    ("value", "text"), [(0.1234, "0.123"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (12345.6, "12346"), (-2.5, "-2.50")]
)
def test_three_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_pairs_are_compared_with_each_other() -> None:
    """One slow moment that hit both ways is no difference between them."""
    assert paired([1.0, 101.0, 2.0], [0.5, 100.0, 1.0]) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="shorter"):
        paired([1.0], [])


def test_a_row_without_values_says_so() -> None:
    assert Sample().cells() == ["–", "–", "–", "0"]
    assert Sample([0.001, 0.002, 0.003]).cells()[0] == "2.00"


def test_the_document_says_what_was_found() -> None:
    finding = Finding("some", "Some table (ms)", ["", "p50"], about="How.", rows=[["a | b", "1.5"]], notes=["A note."])
    finding.verdicts.append(Verdict("fast enough", "3 ms", "2 ms", reached=False))
    finding.keep("a", Sample([0.0015]))
    again = Finding.of_json(finding.as_json())
    assert again == finding
    text = report.document({"Kernel": "6.1"}, [again])
    for expected in ("| Kernel | 6.1 |", "| fast enough | 3 ms | 2 ms | **missed** |", "| a / b | 1.5 |", "A note.", "## Some table (ms)"):
        assert expected in text


def test_every_part_has_a_name_of_its_own() -> None:
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    assert run.DOCUMENT.parent.name == "docs"
