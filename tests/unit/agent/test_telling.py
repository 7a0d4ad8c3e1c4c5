"""What a poll says of what is held: the whole, or what is new since control took it in."""

from __future__ import annotations

import random

from atoll.agent.telling import WHOLE_AFTER_MISS, WHOLE_EVERY_S, Telling
from atoll.control.sessions.holdings import Held
from atoll.wire.agent import HostFacts, HostHealth, Poll


class Clock:
    """Stands still unless it is told to go on."""

    now_s = 1000.0

    def boot(self) -> float:
        return self.now_s

    now = monotonic = boot


ROOM = 100_000
FACTS = HostFacts(arch="x86_64", cpu_count=2, memory_mib=1, disk_mib=1)


def test_after_the_whole_only_changes_are_told() -> None:
    telling = Telling(Clock())
    word = telling.compose({"a": (1, 0), "b": (1, 2)}, bytes_max=ROOM)
    assert (word.since, word.holds, word.end_revisions, word.dropped) == (None, {"a": 1, "b": 1}, {"b": 2}, [])
    telling.answered(7)
    word = telling.compose({"a": (2, 0), "c": (1, 0)}, bytes_max=ROOM)
    assert (word.since, word.holds, word.end_revisions, word.dropped) == (7, {"a": 2, "c": 1}, {}, ["b"])
    telling.answered(8)
    assert telling.compose({"a": (2, 0), "c": (1, 0)}, bytes_max=ROOM).holds == {}


def test_a_lost_poll_and_time_bring_the_whole() -> None:
    clock = Clock()
    telling = Telling(clock)
    telling.compose({"a": (1, 0)}, bytes_max=ROOM)
    telling.answered(1)
    telling.compose({"a": (1, 0)}, bytes_max=ROOM)
    telling.lost()
    word = telling.compose({"a": (1, 0)}, bytes_max=ROOM)
    assert (word.since, word.holds) == (None, {"a": 1})
    telling.answered(3)
    clock.now_s += WHOLE_EVERY_S
    assert telling.compose({"a": (1, 0)}, bytes_max=ROOM).since is None


def test_control_that_does_not_know_the_poll_before_is_told_the_whole_for_a_while() -> None:
    telling = Telling(Clock())
    telling.compose({"a": (1, 0)}, bytes_max=ROOM)
    telling.answered(1)
    assert telling.compose({"a": (1, 0)}, bytes_max=ROOM).since == 1
    telling.answered(None)
    for seq in range(WHOLE_AFTER_MISS):
        word = telling.compose({"a": (1, 0)}, bytes_max=ROOM)
        assert (word.since, word.holds) == (None, {"a": 1})
        telling.answered(seq)
    assert telling.compose({"a": (1, 0)}, bytes_max=ROOM).since == WHOLE_AFTER_MISS - 1


def test_control_that_takes_nothing_in_is_told_all_in_turns() -> None:
    telling = Telling(Clock())
    held = {f"plc_{number:020}": (1, 1) for number in range(100)}
    heard: set[str] = set()
    for _ in range(12):
        word = telling.compose(held, bytes_max=1000)
        assert word.since is None
        assert not word.more
        heard.update(word.holds)
        telling.answered(None)
    assert heard == set(held)


def test_what_control_puts_together_is_what_is_held() -> None:
    """Random changes, lost polls and lost answers, replicas in turns, and messages too small for all."""
    for seed in range(30):
        dice = random.Random(seed)
        telling, replicas = Telling(Clock()), [Held(), Held()]
        held: dict[str, tuple[int, int]] = {}
        at, quiet = 0, 0
        for seq in range(1, 400):
            if quiet == 0:
                for _ in range(dice.randrange(4)):
                    name = f"plc_{dice.randrange(40):020}"
                    if name in held and dice.random() < 0.4:
                        del held[name]
                    else:
                        revision, end = held.get(name, (0, 0))
                        held[name] = (revision + 1, 0 if dice.random() < 0.2 else end + 1)
            word = telling.compose(held, bytes_max=dice.choice([400, 1500, 20_000]))
            poll = Poll(
                host_id="h", epoch="e", poll_seq=seq, agent_version="1", facts=FACTS, health=HostHealth(), since=word.since,
                holds=word.holds, end_revisions=word.end_revisions, dropped=word.dropped,
            )  # fmt: skip
            at = dice.randrange(2) if quiet == 0 and dice.random() < 0.1 else at
            if quiet == 0 and dice.random() < 0.1:
                telling.lost()
                continue
            taken = replicas[at].take(poll)
            if quiet == 0 and dice.random() < 0.1:
                telling.lost()
                continue
            telling.answered(replicas[at].taken if taken else None)
            quiet = quiet + 1 if seq > 300 else 0
            if quiet > 60 and not word.more:
                assert replicas[at].holds == {name: revision for name, (revision, _) in held.items()}
                assert replicas[at].ends == {name: end for name, (_, end) in held.items() if end}
                break
        else:
            raise AssertionError(f"seed {seed} never told the whole")
