"""The stand of the `fake` driver: a fake machine, which a lost driver leaves as it is."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from atoll.domain.spec import Isolation, Spec
from atoll.drivers.fake.driver import FakeDriver, FakeMachine
from atoll.drivers.port import Driver, Image, Mark, Order, Seen
from atoll.testing.conformance.guest import GuestClient
from atoll.testing.conformance.stand import World


class FakeStand:
    """A Stand without a machine."""

    gateway_address = ""
    memory_mib_min = 0

    def __init__(self) -> None:
        self.machine = FakeMachine()
        self.exits: list[tuple[str, str]] = []
        self._mark = Mark("ins_" + "f" * 20, "hst_" + "f" * 20)
        self._numbers = itertools.count(1)
        self.driver = FakeDriver(self._mark, machine=self.machine)

    async def open(self) -> None:
        await self.driver.open(self._on_exit)

    async def close(self) -> None:
        await self.driver.close()

    async def _on_exit(self, placement_id: str, reason: str) -> None:
        self.exits.append((placement_id, reason))

    def order(self, **spec: Any) -> Order:
        number = next(self._numbers)
        image = self.machine.images[0]
        plain = Spec("default", "tpl_fake", image.digest, image.name, Isolation.GVISOR, 1000, 512, 1024, 512, 300)
        return Order(f"plc_{number:020}", f"i{number:020}", 1, replace(plain, **spec), f"nonce-{number}", "", "fake")

    async def reopen(self) -> Driver:
        self.driver = FakeDriver(self._mark, machine=self.machine)
        await self.open()
        return self.driver

    async def close_driver(self) -> Driver:
        await self.driver.close()
        return await self.reopen()

    async def stranger(self) -> Driver:
        other = FakeDriver(Mark(self._mark.install_id, "hst_" + "s" * 20), machine=self.machine)
        await other.open(self._on_exit)
        return other

    async def guest(self, order: Order, seen: Seen) -> GuestClient:
        raise NotImplementedError("a fake guest answers nothing: guest_handshake is not declared")

    async def end_guest(self, order: Order, seen: Seen) -> None:
        await self.driver.end_guest(order.placement_id)

    def traces(self, order: Order) -> Sequence[str]:
        return [order.placement_id] if order.placement_id in self.machine.placements else []

    def cpu_used_s(self, order: Order) -> float:
        raise NotImplementedError("a fake guest uses nothing: real_kernel_limits is not declared")

    @contextlib.asynccontextmanager
    async def damage_image(self) -> AsyncIterator[Order]:
        digest = "sha256:" + "d" * 64
        self.machine.images.append(Image(digest, "damaged"))
        self.machine.corrupt.add(digest)
        try:
            yield self.order(image=digest, image_name="damaged")
        finally:
            self.machine.corrupt.discard(digest)
            self.machine.images.pop()

    def world(self) -> contextlib.AbstractAsyncContextManager[World]:
        raise NotImplementedError("a fake machine has no network: network_slots is not declared")
