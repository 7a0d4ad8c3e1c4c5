import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.client import connect

MESSAGES = st.lists(st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=20)), max_size=3), max_size=8)


@given(MESSAGES, st.lists(st.integers(min_value=1, max_value=7), min_size=1, max_size=20))
def test_frames_survive_any_cutting(messages: list[dict[str, object]], cuts: list[int]) -> None:
    data = b"".join(connect.encode(message) for message in messages)
    frames, found, at = connect.Frames(), [], 0
    while at < len(data):
        size = cuts[at % len(cuts)]
        found += [message for _, message in frames.feed(data[at : at + size])]
        at += size
    assert found == messages
    assert not frames.unfinished


def test_flags_are_told_and_an_empty_end_is_an_empty_object() -> None:
    assert list(connect.Frames().feed(b"\x02\0\0\0\0")) == [(connect.END_STREAM, {})]


def test_an_unfinished_frame_is_known() -> None:
    frames = connect.Frames()
    assert list(frames.feed(connect.encode({"a": 1})[:-1])) == []
    assert frames.unfinished


@pytest.mark.parametrize(
    "data",
    [
        b"\x01\0\0\0\x02{}",
        b"\0\0\0\0\x02[]",
        b"\0\0\0\0\x03x{}",
        b"\0\xff\xff\xff\xff",
        b"HTTP/1.1 502 Bad Gateway",
    ],
)
def test_what_is_no_stream_is_refused(data: bytes) -> None:
    with pytest.raises(connect.FramingError):
        list(connect.Frames().feed(data))


@given(st.binary(max_size=200))
def test_no_bytes_break_it(data: bytes) -> None:
    try:
        for _, message in connect.Frames().feed(data):
            json.dumps(message)
    except connect.FramingError:
        pass
