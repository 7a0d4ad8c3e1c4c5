"""Observations are said until control has committed them, in messages that fit."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from atoll.agent.backoff import Backoff
from atoll.agent.messages import OVERHEAD_BYTES, Window, part_of
from atoll.agent.outbox import Outbox
from atoll.agent.record import Record
from atoll.domain.command import Kind


def record(n=1, seq=1, detail=None) -> Record:
    made = Record(f"plc_{n}", f"i{n}", "tea", 1, Kind.ENSURE_RUNNING, 1, "c", "d", "b")
    return replace(made, seq=seq, detail=detail)


def take(outbox, **more):
    return [(o.placement_id, o.seq) for o in outbox.take(bytes_max=100_000, **more)]


def test_one_message_at_a_time_carries_an_observation():
    outbox = Outbox()
    outbox.put(record(), urgent=True)
    assert outbox.urgent.is_set()
    assert take(outbox) == [("plc_1", 1)]
    assert take(outbox) == []
    assert not outbox.more()


def test_a_newer_state_overtakes_the_one_in_flight():
    outbox = Outbox()
    outbox.put(record(seq=1), urgent=False)
    first = outbox.take(bytes_max=10_000)
    outbox.put(record(seq=2), urgent=False)
    assert take(outbox) == [("plc_1", 2)]
    outbox.landed(first, {"plc_1": 1})
    assert len(outbox) == 1
    assert not outbox.more()
    outbox.landed([], {"plc_1": 2})
    assert len(outbox) == 0


def test_a_lost_message_gives_its_entries_back():
    outbox = Outbox()
    outbox.put(record(), urgent=False)
    outbox.lost(outbox.take(bytes_max=10_000))
    assert take(outbox) == [("plc_1", 1)]


def test_what_an_answer_does_not_acknowledge_is_said_again():
    outbox = Outbox()
    outbox.put(record(1), urgent=False)
    outbox.put(record(2), urgent=False)
    outbox.landed(outbox.take(bytes_max=10_000), {"plc_2": 1})
    assert take(outbox) == [("plc_1", 1)]


def test_an_older_state_never_replaces_a_newer_one():
    outbox = Outbox()
    outbox.put(record(seq=5), urgent=False)
    outbox.put(record(seq=4), urgent=False)
    assert take(outbox) == [("plc_1", 5)]


def test_say_again_sends_what_is_in_flight_once_more():
    outbox = Outbox()
    outbox.put(record(), urgent=False)
    take(outbox)
    outbox.say_again(record())
    assert take(outbox) == [("plc_1", 1)]


def test_messages_are_split_by_count_and_by_size():
    outbox = Outbox()
    for n in range(10):
        outbox.put(record(n, detail="x" * 1000), urgent=False)
    assert len(take(outbox, count_max=4)) == 4
    assert 1 <= len(outbox.take(bytes_max=3000)) <= 2
    assert len(outbox.take(bytes_max=10)) == 1, "one always goes, however small the room"
    assert outbox.more()


@given(st.integers(0, 60), st.integers(30, 400))
def test_repeated_parts_fit_and_all_get_their_turn(count, room):
    items = [f"plc_{n:03d}" for n in range(count)]
    window = Window()
    said: set[str] = set()
    for _ in range(count + 1):
        part, size = part_of(items, window, bytes_max=room)
        assert size <= room
        assert size == sum(len(i) + OVERHEAD_BYTES for i in part)
        assert len(set(part)) == len(part)
        said.update(part)
    if room >= 7 + OVERHEAD_BYTES:
        assert said == set(items)


def test_everything_fits_in_order():
    assert part_of(["b", "a"], Window(5), bytes_max=1000)[0] == ["b", "a"]


def test_pauses_double_within_their_limits():
    low = Backoff(lambda n: b"\0" * n, first_s=0.1, most_s=1.0)
    high = Backoff(lambda n: b"\xff" * n, first_s=0.1, most_s=1.0)
    assert [round(low.next_s(), 3) for _ in range(5)] == [0.05, 0.1, 0.2, 0.4, 0.5]
    assert [round(high.next_s(), 3) for _ in range(5)] == [0.1, 0.2, 0.4, 0.8, 1.0]
    high.reset()
    assert round(high.next_s(), 3) == 0.1
    for _ in range(5000):
        assert high.next_s() <= 1.0
