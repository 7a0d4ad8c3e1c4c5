"""Invariants: what must hold after every single commit, and what must hold in the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import sqlalchemy as sa

from atoll.domain.placement import Holding
from atoll.domain.sandbox import TERMINAL
from atoll.drivers.fake.driver import FakeMachine
from atoll.drivers.port import Power
from atoll.store import facts, hosts
from atoll.store.tables import PLACEMENTS, SANDBOXES


class Violated(AssertionError):
    """A promise is broken."""


def after_commit(conn: sa.Connection, machines: Mapping[str, FakeMachine]) -> None:
    """Capacity is never granted twice; a sandbox never holds two placements, never runs twice; what is released runs nowhere."""
    for host in hosts.all_hosts(conn):
        lacking = host.capacity.lacks(facts.used(conn, host.id))
        if lacking:
            raise Violated(f"host {host.name} has granted more {lacking} than it has")
    holding = Counter(row[0] for row in conn.execute(sa.select(PLACEMENTS.c.sandbox_id).where(PLACEMENTS.c.holding != Holding.NONE.value)))
    for sandbox_id, count in holding.items():
        if count > 1:
            raise Violated(f"sandbox {sandbox_id} holds {count} placements")
    running = Counter(p.order.sandbox_id for machine in machines.values() for p in machine.placements.values() if p.power is Power.RUNNING)
    for sandbox_id, count in running.items():
        if count > 1:
            raise Violated(f"sandbox {sandbox_id} runs {count} times")
    ended = {row[0] for row in conn.execute(sa.select(SANDBOXES.c.id).where(SANDBOXES.c.state.in_([s.value for s in TERMINAL])))}
    ghosts = sorted(ended & set(running))
    if ghosts:
        raise Violated(f"{ghosts} ended and still run")


def in_the_end(conn: sa.Connection, machines: Mapping[str, FakeMachine]) -> None:
    """Everything released has gone from records and machines."""
    left = [row[0] for row in conn.execute(sa.select(SANDBOXES.c.id).where(SANDBOXES.c.state.not_in([s.value for s in TERMINAL])))]
    if left:
        raise Violated(f"{left} never ended")
    for host in hosts.all_hosts(conn):
        if hosts.placements_held(conn, host.id):
            raise Violated(f"host {host.name} still holds something")
    for name, machine in machines.items():
        if machine.placements:
            raise Violated(f"host {name} still has {sorted(machine.placements)}")
