import pytest

from atoll.base.errors import HINTS, AtollError, Bug, Code, OutcomeUnknown, Refused, Unavailable


@pytest.mark.parametrize(
    ("kind", "family"), [(Refused, "refused"), (Unavailable, "unavailable"), (OutcomeUnknown, "outcome_unknown"), (Bug, "bug")]
)
def test_each_family_says_which_it_is(kind: type[AtollError], family: str) -> None:
    error = kind(Code.NO_CAPACITY, "no host has room", asked_mib=512)
    assert error.family == family
    assert error.code is Code.NO_CAPACITY
    assert error.hint == HINTS[Code.NO_CAPACITY]
    assert error.detail == {"asked_mib": 512}
    assert str(error) == "NO_CAPACITY: no host has room"


def test_a_hint_can_be_more_exact_than_the_code_s() -> None:
    assert Refused(Code.PORT_TAKEN, "3000 is in use", hint="Stop nginx.").hint == "Stop nginx."


def test_unavailable_says_when_to_come_again() -> None:
    assert Unavailable(Code.STORE_FULL, "full").retry_after_s == 1.0
    assert Unavailable(Code.RATE_LIMITED, "slow down", retry_after_s=4.0).retry_after_s == 4.0
