"""Storms: public clients at work while programs, supervisor and guests are killed at random moments.

Afterwards every sandbox that a client knows works, with the command that was running in it, or has ended with a reason; none has two
guests; and what has ended has left nothing on the machine.
"""

from __future__ import annotations

import pytest

from tests.instance.conftest import Instance, until
from tests.instance.storm import Storm
from tests.instance.survival import Client, problems

SHORT_S = 15
LONG_S = 120


def weather(instance: Instance, client: Client, seed: int, seconds: float, **changes: object) -> Storm:
    """A storm that has passed and left nothing behind, but what it made."""
    storm = Storm(instance, client, seed, seconds, **changes)  # type: ignore[arg-type]
    storm.run()
    print(f"seed {seed}: {dict(storm.done)}\n" + "\n".join(f"{count} x {what}" for what, count in storm.met.most_common()))
    assert storm.bugs == []
    assert storm.lies == []
    assert storm.settle() == []
    return storm


def calm(storm: Storm) -> None:
    assert storm.unaccounted() == []
    storm.end_all()
    until(lambda: not problems(storm.instance, storm.client), within_s=60, what=lambda: str(problems(storm.instance, storm.client)))
    assert storm.client.living() == {}


def test_a_storm(instance: Instance, client: Client) -> None:
    calm(weather(instance, client, 1, SHORT_S))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_a_long_storm(instance: Instance, client: Client, seed: int) -> None:
    calm(weather(instance, client, seed, LONG_S))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["control", "agent", "edge", "supervisor"])
def test_a_storm_over_one_program(instance: Instance, client: Client, victim: str) -> None:
    calm(weather(instance, client, 5, 60, victims=(victim,), pause_s=(1.5, 4.0), guests_too=False))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_hail_of_kills(instance: Instance, client: Client) -> None:
    """So dense that hardly anything gets done; what has begun is accounted for all the same."""
    calm(weather(instance, client, 6, 60, pause_s=(0.1, 1.5), victims=("control", "agent", "edge")))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_storm_over_guests(instance: Instance, client: Client) -> None:
    calm(weather(instance, client, 7, 60, victims=(), pause_s=(0.1, 0.8)))
