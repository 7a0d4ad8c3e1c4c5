"""What a start command does to its sandbox's deadlines, and to its end."""

from dataclasses import replace

from atoll.base.errors import Code
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.domain.sandbox import State
from atoll.domain.spec import OnLoss
from atoll.planning.stimuli import Heard, Tick
from tests.builders import NOW, spec
from tests.unit.planning.test_reconcile import after, kinds, moved, placed, report

STARTS = spec(command=("serve",), start_s=45.0)


def test_a_start_command_has_time_of_its_own() -> None:
    facts = placed(spec=STARTS)
    assert facts.sandbox.deadline_at == NOW + 600 + 60 + 45 + 30
    assert facts.sandbox.end_at == NOW + 60 + 45 + 300
    booting = after(facts, Heard(report(facts, Observed.STARTING)), now=NOW + 5)
    assert booting.sandbox.deadline_at == NOW + 5 + 60 + 45 + 30


def test_a_start_command_that_fails_is_not_tried_again() -> None:
    """Another attempt takes as long again, which is longer than anybody waits."""
    facts = placed(spec=STARTS)
    failed = after(facts, Heard(report(facts, Observed.ERROR, reason=Code.START_COMMAND_FAILED, detail="exit status 4")))
    assert (failed.sandbox.state, failed.sandbox.reason, failed.sandbox.detail) == (
        State.RELEASING,
        Code.START_COMMAND_FAILED,
        "exit status 4",
    )
    assert failed.sandbox.failing


def test_a_start_command_that_was_ready_once_is_tried_again() -> None:
    """It is begun anew because it was lost, under a class that says so: its generation tells."""
    facts = placed(spec=replace(STARTS, on_loss=OnLoss.REPLACE), generation=2)
    assert (facts.sandbox.attempts, facts.sandbox.generation) == (1, 2)
    failed = after(facts, Heard(report(facts, Observed.ERROR, reason=Code.START_COMMAND_FAILED, detail="exit status 4")))
    assert failed.sandbox.state is State.PROVISIONING
    assert failed.placement is not None
    assert failed.placement.desired is Kind.ENSURE_ABSENT


def test_who_gives_up_on_a_start_command_says_what_it_said() -> None:
    """Its host waits longer than control does: the words that came from there until then are the reason."""
    facts = placed(spec=STARTS)
    waiting = after(facts, Heard(report(facts, Observed.RUNNING, reason=Code.START_COMMAND_FAILED, detail="no port yet")), now=NOW + 5)
    assert waiting.sandbox.state is State.PROVISIONING
    deadline = waiting.sandbox.deadline_at
    assert deadline is not None
    late = moved(waiting, Tick(), now=deadline)
    assert (late.sandbox.state, late.sandbox.reason) == (State.RELEASING, Code.START_COMMAND_FAILED)
    assert late.sandbox.detail == "the start command is not ready yet: no port yet"
    assert kinds(late) == ["sandbox.deadline_missed", "sandbox.releasing"]
