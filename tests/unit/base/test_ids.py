import os
from collections import Counter

import pytest

from atoll.base.ids import ALPHABET, Prefix, is_id, new_id
from tests.builders import seeded


@pytest.mark.parametrize("prefix", Prefix)
def test_an_id_has_its_prefix_and_twenty_characters(prefix: Prefix) -> None:
    made = new_id(prefix, os.urandom)
    assert made.startswith(prefix)
    assert len(made) == len(prefix) + 20
    assert is_id(prefix, made)


def test_a_sandbox_id_fits_beside_a_port_in_a_host_name() -> None:
    label = "65535-" + new_id(Prefix.SANDBOX, os.urandom)
    assert len(label) <= 63
    assert label.replace("-", "").isalnum()
    assert label == label.lower()


def test_ids_follow_from_the_dice_alone() -> None:
    assert new_id(Prefix.HOST, seeded(7)) == new_id(Prefix.HOST, seeded(7))
    assert new_id(Prefix.HOST, seeded(7)) != new_id(Prefix.HOST, seeded(8))


def test_every_character_is_equally_likely() -> None:
    """252 = 7 x 36: without throwing the four highest bytes away, a to d would be one eighth more likely."""
    dice = seeded(1)
    counts = Counter("".join(new_id(Prefix.SANDBOX, dice)[1:] for _ in range(5000)))
    assert set(counts) == set(ALPHABET)
    expected = 100_000 / 36
    assert max(abs(count - expected) for count in counts.values()) < expected * 0.08


def test_high_bytes_are_thrown_away() -> None:
    rolls = iter([b"\xff" * 32, b"\xfc" * 32, b"\x00" * 32])
    assert new_id(Prefix.HOST, lambda n: next(rolls)) == "hst_" + "a" * 20


@pytest.mark.parametrize(
    "text",
    ["", "i", "i" + "a" * 19, "i" + "a" * 21, "i" + "A" * 20, "i" + "a" * 19 + "-", "j" + "a" * 20, "i" + "a" * 20 + "\n", "i" + "ä" * 20],
)
def test_what_is_no_sandbox_id(text: str) -> None:
    assert not is_id(Prefix.SANDBOX, text)


def test_no_prefix_begins_another() -> None:
    """`i` is a sandbox's; a longer prefix that began with it would be read as one."""
    for one in Prefix:
        for other in Prefix:
            if one is not other and one is not Prefix.SANDBOX:
                assert not other.startswith(one)
    assert all(prefix.endswith("_") for prefix in Prefix if prefix is not Prefix.SANDBOX)
