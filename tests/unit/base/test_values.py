import json

import pytest

from atoll.base.secret import Secret
from atoll.base.units import ZERO, Vector


def test_a_secret_never_shows_itself() -> None:
    secret = Secret("e2b_very_secret")
    for shown in (repr(secret), str(secret), f"{secret}", f"{secret!r}", "%s" % secret, str({"key": secret}), repr([secret])):  # noqa: UP031
        assert "very_secret" not in shown
    with pytest.raises(TypeError):
        json.dumps(secret)
    assert secret.reveal() == "e2b_very_secret"


def test_secrets_compare_by_value() -> None:
    assert Secret("a") == Secret("a")
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert len({Secret("a"), Secret("a")}) == 1


def test_vectors_add_and_subtract_by_resource() -> None:
    assert Vector(1, 2, 3, 4) + Vector(10, 20, 30, 40) == Vector(11, 22, 33, 44)
    assert Vector(11, 22, 33, 44) - Vector(10, 20, 30, 40) == Vector(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("need", "lacking"),
    [
        (ZERO, []),
        (Vector(10, 10, 10, 10), []),
        (Vector(11, 10, 10, 10), ["CPU"]),
        (Vector(10, 11, 10, 10), ["MEMORY"]),
        (Vector(10, 10, 11, 10), ["DISK"]),
        (Vector(10, 10, 10, 11), ["SLOTS"]),
        (Vector(11, 11, 11, 11), ["CPU", "MEMORY", "DISK", "SLOTS"]),
    ],
)
def test_what_a_vector_lacks(need: Vector, lacking: list[str]) -> None:
    assert Vector(10, 10, 10, 10).lacks(need) == lacking


def test_an_overcommitted_rest_lacks_even_a_need_of_nothing_more() -> None:
    """Capacity lowered below what is used: nothing of that resource may be granted."""
    assert Vector(-1, 5, 5, 5).lacks(Vector(1, 1, 1, 1)) == ["CPU"]
