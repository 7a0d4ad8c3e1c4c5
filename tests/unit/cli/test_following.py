"""A build's log on a terminal: no two steps' lines are mixed, and nobody waits for a silent one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.cli.following import SILENT_S, Pages


class Screen:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now = 0.0
        self.pages = Pages(self.lines.append, lambda: self.now)


def test_what_two_stages_say_at_once_is_shown_step_by_step() -> None:
    screen = Screen()
    screen.pages.take([("a:1", "[a 1]"), ("b:1", "[b 1]"), ("a:1", "of a"), ("b:1", "of b"), ("a:1", "more of a")])
    assert screen.lines == ["[a 1]", "of a", "more of a"]
    screen.pages.take([("a:2", "[a 2]"), ("b:1", "more of b")])
    assert screen.lines[3:] == ["[b 1]", "of b", "more of b"]
    screen.pages.end()
    assert screen.lines[6:] == ["[a 2]"]


def test_a_silent_step_holds_nobody_back_and_says_again_what_it_is() -> None:
    screen = Screen()
    screen.pages.take([("a:1", "[a 1]"), ("b:1", "[b 1]")])
    screen.now += SILENT_S / 2
    screen.pages.take([])
    assert screen.lines == ["[a 1]"]
    screen.now += SILENT_S
    screen.pages.take([("b:1", "of b")])
    assert screen.lines == ["[a 1]", "[b 1]", "of b"]
    screen.pages.take([("a:1", "late")])
    screen.pages.end()
    assert screen.lines[3:] == ["[a 1] (goes on)", "late"]


@given(st.lists(st.tuples(st.sampled_from(["a:1", "a:2", "b:1", "1", "2"]), st.booleans())))
def test_every_line_is_shown_once_and_in_its_steps_order(said: list[tuple[str, bool]]) -> None:
    screen = Screen()
    lines: dict[str, list[str]] = {}
    for number, (step, pause) in enumerate(said):
        lines.setdefault(step, []).append(f"{step} {number}")
        screen.pages.take([(step, f"{step} {number}")])
        screen.now += 2 * SILENT_S if pause else 0.0
    screen.pages.end()
    shown = [line for line in screen.lines if not line.endswith("(goes on)")]
    assert len(shown) == len(said)
    for step, expected in lines.items():
        assert [line for line in shown if line.split()[0] == step] == expected
