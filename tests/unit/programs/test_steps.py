import io
import subprocess
import sys

import pytest

from atoll.base.errors import Code, Unavailable
from atoll.programs import steps
from atoll.programs.steps import Steps


def test_each_step_is_one_line_with_its_time() -> None:
    shown = Steps(stream=io.StringIO())
    with shown.step("ports") as step:
        step.detail = "3000 to 3002"
    text = shown.stream.getvalue()  # type: ignore[attr-defined]
    assert text.count("\n") == 1
    assert "ports" in text
    assert text.rstrip().endswith("3000 to 3002")
    assert [done.name for done in shown.done] == ["ports"]


def test_a_failed_step_is_remembered_and_shown() -> None:
    shown = Steps(stream=io.StringIO())
    with pytest.raises(Unavailable), shown.step("control"):
        raise Unavailable(Code.SETUP_FAILED, "no")
    assert shown.failed == "control"
    assert "✗ control" in shown.stream.getvalue()  # type: ignore[attr-defined]


def test_quiet_prints_nothing_and_keeps_the_record() -> None:
    shown = Steps(stream=io.StringIO(), quiet=True)
    with shown.step("ports"):
        pass
    shown.say("x")
    assert shown.stream.getvalue() == ""  # type: ignore[attr-defined]
    assert len(shown.done) == 1


def test_steps_go_on_when_nobody_reads_any_more() -> None:
    code = "import sys; sys.stdin.read(); from atoll.programs.steps import Steps; s = Steps(); s.say('a')\n"
    code += "with s.step('b'): pass\ns.say('c'); print([d.name for d in s.done], s.failed, file=sys.stderr)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ran:
        assert ran.stdin is not None
        assert ran.stdout is not None
        assert ran.stderr is not None
        ran.stdout.close()
        ran.stdin.close()
        said = ran.stderr.read()
    assert (ran.returncode, said) == (0, "['b'] None\n")


def test_waiting_ends_with_what_was_found_or_with_the_problem() -> None:
    answers = iter([None, None, 7])
    assert steps.wait_for(lambda: next(answers), within_s=5, problem=AssertionError, every_s=0) == 7
    with pytest.raises(Unavailable):
        steps.wait_for(lambda: None, within_s=0.01, problem=lambda: Unavailable(Code.NO_HOSTS, "late"), every_s=0.001)


@pytest.mark.parametrize(("elapsed_ms", "text"), [(0.4, "0 ms"), (999.4, "999 ms"), (1234, "1.23 s")])
def test_durations(elapsed_ms: float, text: str) -> None:
    assert steps.duration(elapsed_ms) == text
