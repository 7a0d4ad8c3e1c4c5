"""What holds for every transition table, and what the words of each table mean."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import pytest

from atoll.base.errors import Bug
from atoll.domain import command, host, machine, placement, sandbox
from atoll.domain.command import Kind, Wish
from atoll.domain.host import Admin, AdminEvent
from atoll.domain.placement import Grant, Holding
from atoll.domain.sandbox import Event, State

MACHINES = [
    pytest.param(sandbox.MOVES, State, Event, State.PENDING, sandbox.TERMINAL, id="sandbox"),
    pytest.param(placement.HOLDING_MOVES, Holding, Grant, Holding.RESERVED, {Holding.NONE}, id="holding"),
    pytest.param(command.MOVES, Kind, Wish, Kind.ENSURE_PRESENT, {Kind.ENSURE_ABSENT}, id="command"),
    pytest.param(host.MOVES, Admin, AdminEvent, Admin.DRAINING, set(), id="host"),
]
Moves = Mapping[tuple[Any, Any], Any]


@pytest.mark.parametrize(("moves", "states", "events", "first", "terminal"), MACHINES)
def test_a_table_speaks_only_its_own_words(moves: Moves, states: type[StrEnum], events: type[StrEnum], first: Any, terminal: Any) -> None:
    assert {state for state, _ in moves} | set(moves.values()) <= set(states)
    assert {event for _, event in moves} == set(events), "an event that nothing answers to"


@pytest.mark.parametrize(("moves", "states", "events", "first", "terminal"), MACHINES)
def test_every_state_can_be_reached_and_left_for_the_end(
    moves: Moves, states: type[StrEnum], events: type[StrEnum], first: Any, terminal: Any
) -> None:
    assert reachable(moves, first) == set(states)
    for state in set(states) - set(terminal):
        assert not terminal or reachable(moves, state) & set(terminal), f"{state} has no way to an end"


@pytest.mark.parametrize(("moves", "states", "events", "first", "terminal"), MACHINES)
def test_an_end_leads_nowhere_else(moves: Moves, states: type[StrEnum], events: type[StrEnum], first: Any, terminal: Any) -> None:
    assert {after for (state, _), after in moves.items() if state in terminal} <= set(terminal)


@pytest.mark.parametrize(("moves", "states", "events", "first", "terminal"), MACHINES)
def test_a_pair_that_is_not_in_the_table_raises(
    moves: Moves, states: type[StrEnum], events: type[StrEnum], first: Any, terminal: Any
) -> None:
    missing = [(state, event) for state in states for event in events if (state, event) not in moves]
    assert missing
    for state, event in missing:
        with pytest.raises(machine.IllegalMove) as refused:
            machine.step(moves, state, event)
        assert isinstance(refused.value, Bug)
        assert state.value in str(refused.value)
        assert event.value in str(refused.value)


def reachable(moves: Moves, first: Any) -> set[Any]:
    seen, open_ = {first}, [first]
    while open_:
        at = open_.pop()
        for (state, _), after in moves.items():
            if state is at and after not in seen:
                seen.add(after)
                open_.append(after)
    return seen


@pytest.mark.parametrize("state", sorted(sandbox.LIVING))
def test_release_wins_in_every_living_state(state: State) -> None:
    assert sandbox.step(state, Event.RELEASE) is State.RELEASING


def test_releasing_leads_only_to_an_end() -> None:
    assert {after for (state, _), after in sandbox.MOVES.items() if state is State.RELEASING} == {State.RELEASING, *sandbox.TERMINAL}


def test_only_absence_or_a_fence_gives_capacity_back() -> None:
    assert {grant for (_, grant), after in placement.HOLDING_MOVES.items() if after is Holding.NONE} == {Grant.GONE}


def test_what_is_ordered_away_stays_so() -> None:
    assert {after for (kind, _), after in command.MOVES.items() if kind is Kind.ENSURE_ABSENT} == {Kind.ENSURE_ABSENT}
    for kind in Kind:
        assert command.step(kind, Wish.REMOVE) is Kind.ENSURE_ABSENT


def test_a_lost_placement_can_be_replaced_in_every_state_that_has_one() -> None:
    holding = {state for (state, event), after in sandbox.MOVES.items() if event is Event.REPLACED}
    assert holding == sandbox.LIVING - {State.PENDING, State.RESERVING, State.SUSPENDED, State.RELEASING}


def test_a_disabled_host_stays_disabled_until_it_is_reset() -> None:
    assert host.step(Admin.DISABLED, AdminEvent.DISABLE) is Admin.DISABLED
    assert host.step(Admin.DISABLED, AdminEvent.RESET) is Admin.DRAINING
    for other in (Admin.ACTIVE, Admin.DRAINING):
        with pytest.raises(machine.IllegalMove):
            host.step(other, AdminEvent.RESET)
    with pytest.raises(machine.IllegalMove):
        host.step(Admin.DISABLED, AdminEvent.ACTIVATE)
