"""Three hosts under faults: whatever is cut, killed or lost, nothing is lost and nothing runs twice; and once healed, all agrees."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest

from tests.hosts.rig import Load, Machine, Rig, until

SHORT_S = 30.0
LONG_S = 600.0
CONVERGE_S = 90.0


def burst(rig: Rig, count: int) -> Load:
    load = Load(rig)
    for _ in range(count):
        assert load.create() is not None, load.refused
    return load


def settled(rig: Rig, load: Load) -> None:
    rig.converge(within_s=CONVERGE_S)
    assert load.lost() == []
    assert load.undead() == []


def test_a_killed_agent_finds_its_sandboxes_again(fleet: Rig) -> None:
    load = burst(fleet, 6)
    settled(fleet, load)
    for machine in fleet.machines:
        before = set(machine.held())
        machine.kill_agent()
        assert set(machine.held()) == before
        machine.start_agent()
    until(lambda: fleet.healthy() == 3, within_s=60, what=fleet.last_words)
    settled(fleet, load)
    for sandbox_id in sorted(load.created):
        load.end(sandbox_id)
    settled(fleet, load)
    assert sum(len(machine.held()) for machine in fleet.machines) == 0


@pytest.mark.parametrize(("hears", "is_heard"), [(False, False), (True, False), (False, True)], ids=["both ways", "mute", "deaf"])
def test_a_host_that_was_cut_off_agrees_again(fleet: Rig, hears: bool, is_heard: bool) -> None:
    load = burst(fleet, 4)
    settled(fleet, load)
    cut = fleet.machines[0]
    kept = set(cut.held())
    cut.cut(hears=hears, is_heard=is_heard)
    try:
        for sandbox_id in sorted(load.created)[:2]:
            load.end(sandbox_id)
        time.sleep(5)
        # The answer to a poll that is parked already reaches a host that hears.
        assert hears or kept <= set(cut.held()), "it was told nothing, and ends nothing by itself so soon"
    finally:
        cut.heal()
    settled(fleet, load)
    for sandbox_id in sorted(load.created):
        load.end(sandbox_id)
    settled(fleet, load)


def test_a_killed_control_loses_nothing(fleet: Rig) -> None:
    load = burst(fleet, 4)
    replica = fleet.replicas[0]
    replica.program.kill()
    time.sleep(2)
    replica.start()
    until(replica.well, within_s=60, what=fleet.last_words)
    load.create()
    settled(fleet, load)
    for sandbox_id in sorted(load.created):
        load.end(sandbox_id)
    settled(fleet, load)


def test_disks_may_be_slow(fleet: Rig) -> None:
    """Each answer waits for them, none is given before, and nothing is given up that only takes long."""
    for machine in fleet.machines:
        machine.misfortune.slow(0.5)
    began = time.monotonic()
    load = burst(fleet, 1)
    (first,) = load.created
    until(lambda: fleet.get(first)["state"] == "ready", within_s=30, what=fleet.last_words)
    assert time.monotonic() - began >= 0.5, "the agent has answered before its journal was on the disk"
    for _ in range(5):
        assert load.create() is not None, load.refused
    settled(fleet, load)
    for sandbox_id in sorted(load.created):
        load.end(sandbox_id)
    settled(fleet, load)
    for machine in fleet.machines:
        machine.misfortune.slow(0)


def test_a_machine_that_has_lost_its_power_comes_back_with_its_disk(fleet: Rig) -> None:
    load = burst(fleet, 4)
    settled(fleet, load)
    fallen = max(fleet.machines, key=lambda machine: len(machine.held()))
    fallen.power_off()
    time.sleep(1)
    fallen.power_on()
    fallen.start_agent()
    until(lambda: fleet.healthy() == 3, within_s=60, what=fleet.last_words)
    settled(fleet, load)
    for sandbox_id in sorted(load.created):
        load.end(sandbox_id)
    settled(fleet, load)


def chaos(rig: Rig, *, seconds: float, seed: int) -> Load:
    """Creates and ends while machines are cut off, agents and replicas killed, clocks set and disks slow; healed at the end."""
    dice = random.Random(seed)
    load, stop = Load(rig), threading.Event()

    def work(own: random.Random) -> None:
        mine: list[str] = []
        while not stop.is_set():
            if len(mine) < 6 and own.random() < 0.6:
                made = load.create()
                mine += [made] if made else []
            elif mine:
                load.end(mine.pop(own.randrange(len(mine))))
            time.sleep(own.uniform(0.05, 0.3))

    workers = [threading.Thread(target=work, args=(random.Random(seed * 100 + number),), daemon=True) for number in range(3)]
    for worker in workers:
        worker.start()
    ends = time.monotonic() + seconds
    doubles: list[str] = []
    try:
        while time.monotonic() < ends:
            _fault(rig, dice)
            doubles += rig.doubles()
            time.sleep(dice.uniform(0.5, 2.0))
    finally:
        stop.set()
        for worker in workers:
            worker.join(timeout=120)
        _heal(rig)
    assert doubles == []
    return load


def _fault(rig: Rig, dice: random.Random) -> None:
    machine = dice.choice(rig.machines)
    faults: list[Callable[[], None]] = [
        machine.cut,
        lambda: machine.cut(hears=True),
        lambda: machine.cut(is_heard=True),
        machine.heal,
        machine.heal,
        lambda: _restart(machine),
        lambda: _replica(rig, dice),
        lambda: machine.misfortune.shift(dice.choice([0, 0, 2, -2, 3600, -3600])),
        lambda: dice.choice([machine, *rig.replicas]).misfortune.slow(dice.choice([0, 0.05, 0.5])),
        lambda: _pause(machine, dice.uniform(0.5, 3)),
    ]
    dice.choice(faults)()


def _restart(machine: Machine) -> None:
    machine.kill_agent()
    machine.start_agent()


def _replica(rig: Rig, dice: random.Random) -> None:
    """One at a time, as long as another lives or it comes back at once."""
    replica = dice.choice(rig.replicas)
    replica.program.kill()
    replica.start()


def _pause(machine: Machine, seconds: float) -> None:
    process = machine.agent.process if machine.agent is not None else None
    if process is None or process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGCONT)


def _heal(rig: Rig) -> None:
    for machine in rig.machines:
        machine.heal()
        machine.misfortune.shift(0)
        machine.misfortune.slow(0)
        if machine.agent is None or not machine.agent.running:
            machine.start_agent()
    for replica in rig.replicas:
        replica.misfortune.slow(0)
        if not replica.program.running:
            replica.start()
        until(replica.well, within_s=60, what=rig.last_words)
    until(lambda: rig.healthy() == len(rig.machines), within_s=120, what=rig.last_words)


def chaotic(rig: Rig, *, seconds: float, seed: int) -> None:
    """Chaos, then what must be true."""
    load = chaos(rig, seconds=seconds, seed=seed)
    settled(rig, load)
    assert load.created
    # Also those whose create was heard, and its answer lost.
    for sandbox_id in sorted((load.created - load.ended) | set(rig.living())):
        load.end(sandbox_id)
    settled(rig, load)
    assert sum(len(machine.held()) for machine in rig.machines) == 0
    assert all(host["used"]["slots"] == 0 for host in rig.hosts().values())


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_under_random_faults_one_control_loses_nothing_and_nothing_runs_twice(fleet: Rig) -> None:
    chaotic(fleet, seconds=LONG_S, seed=2)


@pytest.mark.parametrize(("seconds", "seed"), [(SHORT_S, 1), pytest.param(LONG_S, 3, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_under_random_faults_two_replicas_lose_nothing_and_nothing_runs_twice(pair: Rig, seconds: float, seed: int) -> None:
    chaotic(pair, seconds=seconds, seed=seed)


def test_agents_go_to_the_other_replica_when_theirs_is_killed(pair: Rig) -> None:
    load = burst(pair, 3)
    for replica in pair.replicas:
        replica.program.kill()
        until(lambda: pair.healthy() == 3, within_s=60, what=pair.last_words)
        assert load.create() is not None, load.refused
        settled(pair, load)
        replica.start()
        until(replica.well, within_s=60, what=pair.last_words)
    for sandbox_id in sorted(load.created):
        load.end(sandbox_id)
    settled(pair, load)
