"""What `atoll up` says where its first sandbox finds no place."""

import io

import pytest

from atoll.base.errors import HINTS, Code, Unavailable
from atoll.base.secret import Secret
from atoll.client.target import Target
from atoll.programs import demo, up
from atoll.programs.steps import Steps


@pytest.mark.parametrize(
    ("why", "said"),
    [("1 host(s): ISOLATION_UNAVAILABLE x1", "atoll doctor"), ("1 host(s): MEMORY x1", HINTS[Code.NO_CAPACITY])],
)
def test_a_host_that_failed_its_self_test_is_not_told_to_be_full(monkeypatch, why, said):
    def refused(_target):
        raise Unavailable(Code.NO_CAPACITY, why)

    monkeypatch.setattr(demo, "run", refused)
    steps = Steps(io.StringIO())
    with pytest.raises(Unavailable) as error:
        up._first_sandbox(Target("http://127.0.0.1:1", Secret("key"), "http://127.0.0.1:1", "here"), steps)
    assert said in error.value.hint
    assert (error.value.code, error.value.message, steps.failed) == (Code.NO_CAPACITY, why, "first sandbox")
