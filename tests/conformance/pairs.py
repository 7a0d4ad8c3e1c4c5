"""Two hosts on one machine: two drivers with slots, directories and marks of their own, and a store between them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.agent.moments import CarriedMoments, Stored
from atoll.base.ids import Prefix, new_id
from atoll.drivers.oci.config import RuntimeKind
from atoll.drivers.oci.driver import no_step
from atoll.drivers.port import Order, PackList
from atoll.images.moments import MomentCarrier
from atoll.testing.conformance.oci_stand import OciStand
from tests.conformance.conftest import BINARIES, CACHE


class Pair:
    """Two hosts: what is saved at `one` goes on at `other`."""

    def __init__(self, stand: type[OciStand], kind: RuntimeKind, path: Path) -> None:
        self.steps: dict[str, BaseException] = {}

        def made(name: str, on_step: Callable[[str], None]) -> OciStand:
            (path / name).mkdir(exist_ok=True)
            return stand(kind, path / name, binaries=BINARIES, cache=CACHE, on_step=on_step)

        self.one, self.other = made("one", no_step), made("other", self._step)
        while self.other.gateway_address == self.one.gateway_address:  # by chance
            self.other = made("other", self._step)
        self.other.key = self.one.key
        self.folder = path / "store"
        self.folder.mkdir()
        carrier = MomentCarrier(BINARIES / "atoll-io", lambda: {"folder": str(self.folder)})
        self.store = CarriedMoments(carrier, path / "work")

    def _step(self, name: str) -> None:
        if name in self.steps:
            raise self.steps.pop(name)
        no_step(name)

    async def send(self, name: str) -> tuple[Stored, PackList]:
        what = await self.one.driver.pack_list(name)
        return await self.store.upload(name, what), what

    async def bring(self, order: Order, digest: str, snapshot_id: str | None = None) -> None:
        facts = await self.store.facts(digest)
        await self.other.driver.suits(facts)
        inbox = self.other.driver.inbox(snapshot_id or order.placement_id)
        await self.store.fetch(digest, inbox)
        await self.other.driver.receive(order, facts, inbox, snapshot_id=snapshot_id)
        assert not inbox.exists()


@contextlib.asynccontextmanager
async def pair_of(stand: type[OciStand], kind: RuntimeKind, path: Path, lack: str | None) -> AsyncIterator[Pair]:
    """Both open; skips where something lacks."""
    if lack:
        pytest.skip(f"needs {lack}")
    pair = Pair(stand, kind, path)
    await pair.one.open()
    await pair.other.open()
    try:
        yield pair
    finally:
        await pair.one.close()
        await pair.other.close()


def moved(order: Order, *, generation: int = 1) -> Order:
    """The same sandbox's next placement."""
    return replace(
        order, placement_id=new_id(Prefix.PLACEMENT, os.urandom), generation=order.generation + generation, nonce=os.urandom(12).hex()
    )
