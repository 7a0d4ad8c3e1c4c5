"""The artifact store of a simulation, as hosts see it: moments that all of them send to and fetch from, and what can go wrong with it.

Theory of operation. An upload puts what a moment is made of into the store first, and its manifest, with a receipt under the name that it is of,
last; it can end, or fail, between any two of these. What is in the store can be away, and can be spoilt for good. What nobody needs is collected
by the product's own rule: needed by rows, or by a receipt whose name a host still holds.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from atoll.agent.moments import Stored
from atoll.base.errors import Code, Refused, Unavailable
from atoll.drivers.port import MomentFacts, PackList
from atoll.testing.sim.process import Process

FRESH_S: Final = 120.0
"""What is younger is not collected: its host may still be sending what stands on it."""
_SIZE: Final = 1 << 20


@dataclass(slots=True)
class MomentWeather:
    """Of the store. Shares of calls; *Units*: seconds."""

    away: bool = False
    lost: float = 0.0
    slow_s: float = 0.5


@dataclass(slots=True)
class Shelf:
    """It outlives everybody who uses it."""

    weather: MomentWeather = field(default_factory=MomentWeather)
    packs: dict[str, float] = field(default_factory=dict)
    """By digest of the moment that they are of: since when, in true seconds."""
    manifests: dict[str, tuple[MomentFacts, float]] = field(default_factory=dict)
    receipts: dict[str, tuple[str, float]] = field(default_factory=dict)
    spoilt: set[str] = field(default_factory=set)
    uploads: int = 0
    fetches: int = 0

    def collect(self, needed: Collection[str], held: Collection[str], *, now: float) -> None:
        """What nobody needs goes, once it is old. *Units*: true seconds."""
        wanted = set(needed) | {digest for name, (digest, _) in self.receipts.items() if name in held}
        old = now - FRESH_S
        self.receipts = {name: one for name, one in self.receipts.items() if name in held or one[1] >= old}
        self.manifests = {digest: one for digest, one in self.manifests.items() if digest in wanted or one[1] >= old}
        self.packs = {digest: at for digest, at in self.packs.items() if digest in self.manifests or at >= old}

    def names(self) -> list[str]:
        """Placements and snapshots of which there are receipts."""
        return list(self.receipts)

    def left(self) -> list[str]:
        """All that there is."""
        return [*self.packs, *self.manifests, *self.receipts]


class SimMoments:
    """`agent.moments.MomentStore` of one agent run."""

    def __init__(self, shelf: Shelf, process: Process, dice: random.Random) -> None:
        self._shelf = shelf
        self._process = process
        self._dice = dice

    async def upload(self, name: str, what: PackList, *, bases: Sequence[str] = ()) -> Stored:
        """See MomentStore."""
        del bases
        digest = digest_of(what.facts)
        await self._call()
        self._shelf.packs[digest] = self._now()
        await self._call()
        if digest not in self._shelf.packs:
            raise Unavailable(Code.MOMENT_INCOMPLETE, "what it is made of is there no more")
        self._shelf.packs[digest] = self._now()
        self._shelf.manifests[digest] = (what.facts, self._now())
        self._shelf.receipts[name] = (digest, self._now())
        self._shelf.spoilt.discard(digest)
        self._shelf.uploads += 1
        # The answer may be lost.
        await self._call()
        return Stored(digest, _SIZE)

    async def facts(self, digest: str) -> MomentFacts:
        """See MomentStore."""
        await self._call()
        found = self._shelf.manifests.get(digest)
        if found is None:
            raise Refused(Code.MOMENT_UNAVAILABLE, f"{digest} is not in the store")
        if digest in self._shelf.spoilt:
            raise Refused(Code.MOMENT_CORRUPT, f"{digest} is not what it says")
        return found[0]

    async def fetch(self, digest: str, into: Path) -> None:
        """See MomentStore."""
        del into
        await self.facts(digest)
        await self._call()
        if digest not in self._shelf.packs:
            raise Refused(Code.MOMENT_UNAVAILABLE, f"packs of {digest} are not in the store")
        self._shelf.fetches += 1

    async def forget(self, name: str) -> None:
        """See MomentStore."""

    async def _call(self) -> None:
        """One message to the store and back. *Errors*: Unavailable."""
        weather = self._shelf.weather
        await asyncio.sleep(weather.slow_s * self._dice.random())
        self._process.check()
        if weather.away or self._dice.random() < weather.lost:
            raise Unavailable(Code.MOMENT_UNAVAILABLE, "the artifact store does not answer")

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def digest_of(facts: MomentFacts) -> str:
    """By what a moment is known: the same memory is the same moment."""
    return f"sha256:{hashlib.sha256(json.dumps(asdict(facts), sort_keys=True).encode()).hexdigest()}"
