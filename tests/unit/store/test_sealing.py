import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import Bug
from atoll.store.sealing import Sealer

KEY, OTHER = b"k" * 32, b"o" * 32


@given(st.binary(max_size=300))
def test_what_was_sealed_opens(clear: bytes) -> None:
    sealed = Sealer(KEY).seal(clear, table="payloads", row="i1")
    assert Sealer(KEY).open(sealed, table="payloads", row="i1") == clear


def test_nothing_of_it_shows() -> None:
    sealed = Sealer(KEY).seal(b"TOKEN=tops3cret", table="payloads", row="i1")
    assert b"tops3cret" not in sealed
    assert sealed != Sealer(KEY).seal(b"TOKEN=tops3cret", table="payloads", row="i1"), "equal values look equal"


@pytest.mark.parametrize(
    ("key", "table", "row"), [(OTHER, "payloads", "i1"), (KEY, "payloads", "i2"), (KEY, "templates", "i1"), (KEY, "payload", "s/i1")]
)
def test_it_opens_only_in_its_own_place_with_its_own_key(key: bytes, table: str, row: str) -> None:
    sealed = Sealer(KEY).seal(b"value", table="payloads", row="i1")
    with pytest.raises(Bug) as refused:
        Sealer(key).open(sealed, table=table, row=row)
    assert "value" not in str(refused.value).partition(row)[2].replace("sealed value", "")


@given(st.data())
def test_a_changed_byte_is_noticed(data: st.DataObject) -> None:
    sealed = bytearray(Sealer(KEY).seal(b"some value", table="t", row="r"))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Bug):
        Sealer(KEY).open(bytes(sealed), table="t", row="r")


@pytest.mark.parametrize("sealed", [b"", b"\x01", b"\x01" + b"n" * 12, b"\x02" + b"n" * 40])
def test_what_is_no_sealed_value(sealed: bytes) -> None:
    with pytest.raises(Bug):
        Sealer(KEY).open(sealed, table="t", row="r")


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_a_key_has_one_length(length: int) -> None:
    with pytest.raises(Bug):
        Sealer(b"k" * length)
