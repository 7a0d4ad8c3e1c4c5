"""Steps: order, failure, and the words that a person sees."""

import threading
from pathlib import Path

import pytest

from install import progress
from install.progress import Reporter, Step, StepFailed, run_steps


@pytest.fixture(autouse=True)
def own_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "BUILD", tmp_path / "build")


def fail(_: Reporter) -> str:
    raise StepFailed("the disk is full", "free some space")


def test_a_step_waits_for_those_that_it_comes_after() -> None:
    order: list[str] = []

    def note(name: str):
        return lambda _: order.append(name) or "done"

    assert run_steps([Step("c", "c", note("c"), ("b",)), Step("b", "b", note("b"), ("a",)), Step("a", "a", note("a"))])
    assert order == ["a", "b", "c"]


def test_independent_steps_run_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=10)
    meet = lambda _: str(both.wait())
    assert run_steps([Step("a", "a", meet), Step("b", "b", meet)])


def test_a_failure_stops_its_dependants_only_and_says_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []
    good = lambda _: ran.append("x") or "fine"
    steps = [
        Step("disk", "disk", fail),
        Step("after", "after", good, ("disk",)),
        Step("later", "later", good, ("after",)),
        Step("by", "by", good),
    ]
    assert not run_steps(steps)
    shown = capfd.readouterr()
    assert ran == ["x"]
    assert "[4/4] by: fine" in shown.out
    assert "[2/4] after: not tried, it needs disk" in shown.out
    assert "[3/4] later: not tried, it needs after" in shown.out
    assert "Why: the disk is full" in shown.err
    assert "What to do: free some space" in shown.err


def test_a_step_named_only_by_others_is_not_waited_for() -> None:
    assert run_steps([Step("b", "b", lambda _: "done", ("a",))])


def test_a_program_that_fails_is_shown_with_its_last_words(capfd: pytest.CaptureFixture[str]) -> None:
    def act(reporter: Reporter) -> str:
        return reporter.run(["sh", "-c", "echo nothing to see; echo mirror is gone >&2; exit 3"], todo="look at the mirror")

    assert not run_steps([Step("apt", "apt", act)])
    shown = capfd.readouterr().err
    assert "status 3" in shown
    assert "mirror is gone" in shown
    assert "What to do: look at the mirror" in shown


def test_a_program_that_works_gives_its_output() -> None:
    heard: list[str] = []

    def act(reporter: Reporter) -> str:
        reporter.run(["sh", "-c", "echo first"], todo="")
        heard.append(reporter.run(["sh", "-c", 'echo "$WORD"'], todo="", env={"WORD": "second"}))
        return "done"

    assert run_steps([Step("a", "a", act)])
    assert heard == ["second\n"]
