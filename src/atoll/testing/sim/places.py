"""The places of a world: hosts, and the seats of control replicas. Processes in them end and begin again; these stay."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from pathlib import Path

from atoll.agent.config import Identity
from atoll.domain.host import LEASE_S
from atoll.testing.sim.clock import MachineClock
from atoll.testing.sim.handle import Ear
from atoll.testing.sim.machine import SimDriver, SimJournal, SimMachine
from atoll.testing.sim.network import Line, Replica
from atoll.testing.sim.process import Process
from atoll.wire import agent as wire


@dataclass(slots=True)
class Host:
    """One host: what outlives its agent, and the agent run of now."""

    name: str
    number: int
    line: Line
    identity: Identity
    directory: Path
    clock: MachineClock
    things: SimMachine = field(default_factory=SimMachine)
    process: Process | None = None
    driver: SimDriver | None = None
    boots: int = 1
    runs: int = 0
    off: bool = False
    """The machine is switched off: no agent is started."""
    fenced: bool = False
    """An operator has given it up; it joins again when everything heals."""
    journal: SimJournal | None = None
    pause_s: float = 0.5
    """How long until its agent is started again."""
    forgot_at: float = -math.inf
    """When its agent lost its database last, by the boot clock."""
    unable_at: float = -math.inf
    """When something kept its agent from acting last."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    """Its agent is to be started now."""

    def able_since(self, now: float, for_s: float) -> bool:
        """Whether its agent could act all this time, as far as fate is concerned. *Units*: true seconds."""
        things, process = self.things, self.process
        if process is None or not process.alive or process.frozen is not None or self.off or things.failing or things.hanging:
            self.unable_at = now
        if things.journal_refuses or any(placement.stuck for placement in things.placements.values()):
            self.unable_at = now
        if self.line.answered_at <= self.forgot_at:
            # It knows of nothing what is wanted before control has told it again.
            self.unable_at = now
        return now - self.unable_at >= for_s

    def was_unheard(self) -> bool:
        """Whether its line was silent for about a lease, at any time so far."""
        return max(self.line.longest_silence_s, self.clock.boot() - self.line.answered_at) >= LEASE_S - 10.0

    def known(self) -> int:
        """How many placements its agent remembers."""
        return self.journal.count() if self.journal is not None and self.process is not None and self.process.alive else 0

    def facts(self) -> wire.HostFacts:
        """What its agent finds out about it."""
        return wire.HostFacts(arch="x86_64", cpu_count=2, memory_mib=4096, disk_mib=20000, boot_id=f"{self.name}-{self.boots}", claims=True)


@dataclass(slots=True)
class Seat:
    """The place of one control replica."""

    number: int
    clock: MachineClock
    replica: Replica | None = None
    process: Process | None = None
    runs: int = 0
    pause_s: float = 0.5
    ear: Ear = field(default_factory=Ear)
    """Where it hears the other replicas."""
