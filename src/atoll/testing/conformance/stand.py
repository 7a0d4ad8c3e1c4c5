"""What a case is given. One stand is one machine with one driver on it; a case leaves nothing behind, and the stand checks that."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol

from atoll.base.errors import AtollError
from atoll.drivers.port import Driver, Order, Seen
from atoll.testing.conformance.guest import GuestClient, Result


class Holding(Protocol):
    """A server that keeps whoever has come first."""

    port: int

    def heard(self, within_s: float) -> str:
        """What it hears next; `""` at the connection's end, `reset` when it is broken off, `nothing` within this time. Blocking."""
        ...


class World(Protocol):
    """A machine on the far side of the host, with a public address, in a namespace that the stand has made."""

    address: str
    tcp_port: int
    """Answers every connection."""
    udp_port: int
    """Answers every datagram; port 53 answers, too."""
    host_address: str
    """The host's own address on the way to the world."""
    host_port: int
    """A port on which the host answers on all its addresses."""

    def heard_from(self) -> Sequence[str]:
        """Source addresses of the datagrams that have arrived so far."""
        ...

    def reaches(self, address: str, port: int) -> bool:
        """Whether a connection from the world, routed by the host, is accepted there."""
        ...

    def holding(self) -> AbstractContextManager[Holding]:
        """A server out there that keeps a connection and says nothing, while the context lasts."""
        ...

    def resolver(self) -> AbstractContextManager[None]:
        """Something that answers at the gateway's port 53, UDP and TCP, while the context lasts."""
        ...


class Stand(Protocol):
    """The driver under test and its surroundings."""

    driver: Driver
    exits: list[tuple[str, str]]
    """(placement, reason) of each call of on_exit."""
    gateway_address: str
    """Where the guests' resolver is, for drivers with slots."""
    memory_mib_min: int
    """The smallest guest in which the memory cases make sense."""

    def order(self, **spec: Any) -> Order:
        """A new placement's order; keywords override fields of the spec."""
        ...

    async def reopen(self) -> Driver:
        """Lose the driver as a killed agent would, without closing it, and open another on the same machine."""
        ...

    async def close_driver(self) -> Driver:
        """Close the driver in good order and open another on the same machine."""
        ...

    async def stranger(self) -> Driver:
        """An open driver of another host on the same machine; closed by the stand."""
        ...

    async def guest(self, order: Order, seen: Seen) -> GuestClient:
        """The guest of a running placement, initialised."""
        ...

    async def end_guest(self, order: Order, seen: Seen) -> None:
        """Make a running guest end by itself."""
        ...

    def traces(self, order: Order) -> Sequence[str]:
        """What is left of a placement on the machine, found without the driver."""
        ...

    def cpu_used_s(self, order: Order) -> float:
        """CPU time that everything of a running placement has used, as the host counts it. *Units*: seconds."""
        ...

    def damage_image(self) -> AbstractAsyncContextManager[Order]:
        """An order whose image does not match its manifest, while the context lasts."""
        ...

    def world(self) -> AbstractAsyncContextManager[World]:
        """A machine outside, while the context lasts."""
        ...


async def shell(guest: GuestClient, script: str, *, user: str = "root", timeout_s: float = 30.0) -> Result:
    """Run a script in a guest."""
    return await guest.run(["/bin/sh", "-c", script], user=user, timeout_s=timeout_s)


async def refusal(work: object) -> AtollError:
    """Why something was refused."""
    try:
        await work  # type: ignore[misc]
    except AtollError as error:
        return error
    raise AssertionError("it was not refused")
