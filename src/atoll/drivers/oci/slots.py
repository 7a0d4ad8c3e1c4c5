"""Network slots, made ahead: a namespace, a veth pair, an address, and closed rules.

Theory of operation. A slot is used once: it is made in the background, taken by one placement, and ends with it. Its namespace is held
by a file descriptor until the sandbox's processes live in it, so a killed agent leaves no namespace; what may be left are set elements
of nftables, and `open` deletes those without an interface. The interface carries the placement's id as its alias: that is how the
machine itself says whose it is. Slot numbers go round 1..65,000 so that an address comes back late, and only after its connections
and set elements are gone.
One pool serves all drivers of an instance; `open` and `close` count.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from atoll.base.errors import Code, Refused
from atoll.drivers.oci import ruleset
from atoll.drivers.oci.config import Names
from atoll.drivers.oci.ruleset import Egress
from atoll.hostops import conntrack, links, namespaces
from atoll.hostops.netlink import Socket
from atoll.hostops.nft import Nft, NftError

T = TypeVar("T")

SLOTS_MAX: Final = 65_000
LATE_LOOKS_S: Final = (0.5, 2.0, 10.0)
REFILL_DELAY_S: Final = 0.25
_RETIRED_MAX: Final = 64
GUEST_LINK: Final = "eth0"
GATEWAY_MAC: Final = "02:a7:00:00:00:01"
_IP_FORWARD: Final = Path("/proc/sys/net/ipv4/ip_forward")


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot. `namespace_fd` is this process's; close it by `SlotPool.settle` or `give_back`."""

    number: int
    link: str
    address: str
    namespace_fd: int

    @property
    def path(self) -> str:
        """The namespace as a path that other processes can open while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.namespace_fd}"


def address_of(subnet: int, number: int) -> str:
    """The address of a slot: 10.(64+n).x.y, where 0.0 and 254.* stay free."""
    return f"10.{64 + subnet}.{number >> 8}.{number & 255}"


def gateway_of(subnet: int) -> str:
    """The address of the gateway, where the guests' resolver listens."""
    return f"10.{64 + subnet}.255.254"


def guest_mac(address: str) -> str:
    """A locally administered hardware address made of the IPv4 one."""
    return "02:a7:" + ":".join(f"{int(part):02x}" for part in address.split("."))


class SlotPool:
    """Slots of one instance.

    Making and taking happen in one thread, removing in another: the kernel takes 10-30 ms to let an interface go, and nobody who wants
    a slot waits for that.
    """

    def __init__(self, names: Names, *, subnet: int, size: int, closed: tuple[str, ...] = (), mtu: int = 1500) -> None:
        self.names = names
        self.gateway_address = gateway_of(subnet)
        self._subnet = subnet
        self._size = size
        self._closed = closed
        self._mtu = mtu
        self._ready: collections.deque[Slot] = collections.deque()
        self._in_use: dict[int, Slot] = {}
        self._next = random.randrange(1, SLOTS_MAX)
        self._users = 0
        self._nft: Nft | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._ending: ThreadPoolExecutor | None = None
        self._refill_wanted = asyncio.Event()
        self._retired: set[str] = set()
        self._open_fds: set[int] = set()
        self._background: list[asyncio.Task[None]] = []
        self.last_refill_error: str | None = None

    @property
    def subnet_text(self) -> str:
        return f"10.{64 + self._subnet}.0.0/16"

    @property
    def ready_count(self) -> int:
        """Slots made and not taken."""
        return len(self._ready)

    # -- opening and closing

    async def open(self) -> None:
        """Have the gateway, the table and forwarding; delete elements of slots that no longer exist; start filling."""
        self._users += 1
        if self._users > 1:
            return
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slots")
        self._ending = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slots-end")
        try:
            await self._in_thread(self._open)
        except BaseException:
            self._users -= 1
            self._thread.shutdown(wait=False)
            raise
        self._refill_wanted.set()
        self._background = [
            asyncio.create_task(self._fill(), name="slot pool"),
            asyncio.create_task(self._late_orphans(), name="slot pool: orphans"),
        ]

    async def close(self) -> None:
        """Give back the ready slots, and the table and the gateway when no slot is in use. Sandboxes that run keep both."""
        self._users -= 1
        if self._users > 0 or self._thread is None:
            return
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._ending is not None:
            await asyncio.get_running_loop().run_in_executor(self._ending, lambda: None)  # what is under way ends first
        await self._in_thread(self._close)
        for executor in (self._thread, self._ending):
            if executor is not None:
                executor.shutdown(wait=True)
        self._thread = self._ending = None

    # -- for drivers

    async def reserve(self) -> Slot:
        """A slot that nobody else gets; made now when none is ready. It is closed and unnamed until `assign`.

        *Errors*: Refused(INSUFFICIENT_SLOTS) when all numbers are used, OSError of the kernel.
        """
        slot = self._ready.popleft() if self._ready else await self._in_thread(self._make)
        self._in_use[slot.number] = slot
        self._refill_wanted.set()
        return slot

    async def assign(self, slot: Slot, placement_id: str, egress: Egress) -> None:
        """Write the placement's name on a reserved slot and open its egress as told."""
        await self._in_thread(lambda: self._assign(slot, placement_id, egress))

    async def settle(self, slot: Slot) -> None:
        """The sandbox's own processes hold the namespace now: let go of it."""
        self._close_fd(slot)

    async def give_back(self, number: int, address: str) -> None:
        """Remove a slot with its elements and connections. *Idempotency*: a slot that is gone is fine.

        *Errors*: OSError when the interface or the elements cannot be removed.
        """
        slot = self._in_use.pop(number, None)
        if slot is not None:
            self._close_fd(slot)
        if self._ending is None:
            raise RuntimeError("the slot pool is closed")
        await asyncio.get_running_loop().run_in_executor(self._ending, lambda: self._remove(number, address))

    def address(self, number: int) -> str:
        """The address that belongs to a slot number."""
        return address_of(self._subnet, number)

    def existing(self) -> dict[int, str]:
        """Slots that exist on the machine now, by interface: number → placement id, or "" while nobody has it. Blocking, for any thread."""
        with Socket() as route:
            found = {}
            for link in links.list_all(route):
                number = self.names.slot(link.name)
                if number is not None:
                    found[number] = link.alias
            return found

    async def checks(self) -> dict[str, str | None]:
        """Self-checks by id: what is wrong, or None."""
        return await self._in_thread(self._checks)

    # -- in the loop

    def abandon(self) -> None:
        """Let go of everything without touching the machine, as the end of this process would: descriptors close, threads end.

        For tests of what the next run finds.
        """
        for task in self._background:
            task.cancel()
        for executor in (self._thread, self._ending):
            if executor is not None:
                executor.shutdown(wait=True, cancel_futures=True)
        for slot in [*self._ready, *self._in_use.values()]:
            self._close_fd(slot)
        if self._nft is not None:
            self._nft.close()
        self._route.close()
        self._thread = self._ending = None

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            raise RuntimeError("the slot pool is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _late_orphans(self) -> None:
        """Interfaces of a killed run may go only after the table was written; their elements go then."""
        for pause_s in LATE_LOOKS_S:
            await asyncio.sleep(pause_s)
            with contextlib.suppress(OSError):
                await self._in_thread(self._drop_orphans)

    async def _fill(self) -> None:
        pause_s = 0.1
        while True:
            await self._refill_wanted.wait()
            self._refill_wanted.clear()
            if len(self._ready) > self._size // 2:
                # Whoever took one is starting a guest now and needs the machine more than the pool does.
                await asyncio.sleep(REFILL_DELAY_S)
            try:
                while len(self._ready) < self._size:
                    # One at a time: whoever wants a slot now waits for one step, not for the whole batch.
                    await self._in_thread(self._make_ready)
                await self._in_thread(self._forget_retired)
                pause_s, self.last_refill_error = 0.1, None
            except (OSError, Refused) as error:
                self.last_refill_error = str(error)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, 10.0)
                self._refill_wanted.set()

    def _close_fd(self, slot: Slot) -> None:
        if slot.number in self._open_fds:
            self._open_fds.discard(slot.number)
            os.close(slot.namespace_fd)

    # -- in the thread

    def _open(self) -> None:
        self._nft = Nft()
        self._route = Socket()
        gateway = self._gateway_link()
        self._route.batch([links.no_ipv6_address(gateway), links.set_up(gateway), links.add_address(gateway, self.gateway_address)])
        if _IP_FORWARD.read_text().strip() != "1":
            _IP_FORWARD.write_text("1")
        # What an earlier run had ready and nobody took: its namespaces end with it, their interfaces a moment later.
        self._route.batch([links.delete_link(self.names.link(number)) for number, owner in self.existing().items() if not owner])
        self._write_table()

    def _gateway_link(self) -> int:
        """A device for the gateway's address: a dummy, or a bridge without ports where the kernel has no dummies."""
        name = self.names.gateway_link
        found = links.find(self._route, name)
        if found is None:
            try:
                self._route.ask(links.add_link(name, "dummy"))
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                self._route.ask(links.add_link(name, "bridge"))
            found = links.find(self._route, name)
        if found is None:
            raise OSError(errno.ENODEV, f"the gateway device {name} does not appear")
        return found.index

    def _write_table(self) -> None:
        """Write the table anew, in one transaction with the elements of the slots that still exist."""
        kept = ""
        if self.names.table in self._need_nft().tables():
            present = {address_of(self._subnet, number) for number in self.existing()}
            for name in ruleset.SETS:
                with contextlib.suppress(NftError):  # an older table may lack a set
                    texts = [ruleset.element_text(element) for element in self._need_nft().elements(self.names.table, name)]
                    kept += ruleset.keep_elements(self.names, name, (text for text in texts if present & set(text.split(" . "))))
        table = ruleset.table_text(self.names, subnet=self.subnet_text, gateway=self.gateway_address, closed=self._closed)
        self._need_nft().run(table + kept)

    def _close(self) -> None:
        mine = set()
        while self._ready:
            slot = self._ready.popleft()
            mine.add(slot.number)
            self._close_fd(slot)
            self._remove(slot.number, slot.address)
        for slot in self._in_use.values():
            self._close_fd(slot)
        if not set(self.existing()) - mine:
            self._forget_retired()
            with contextlib.suppress(NftError):
                self._need_nft().run(f"delete table {self.names.table}")
            self._route.ask(links.delete_link(self.names.gateway_link))
        self._route.close()
        self._need_nft().close()
        self._nft = None

    def _need_nft(self) -> Nft:
        if self._nft is None:
            raise RuntimeError("the slot pool is closed")
        return self._nft

    def _make_ready(self) -> None:
        """Keeps the slot in the same step, so that a `close` in between finds it."""
        self._ready.append(self._make())

    def _make(self) -> Slot:
        for _ in range(SLOTS_MAX):
            number = self._next
            self._next = number % SLOTS_MAX + 1
            if number & 0xFFFF and number not in self._in_use and number not in self._open_fds and self._usable(number):
                return self._make_number(number)
        raise Refused(Code.INSUFFICIENT_SLOTS, "every network slot number is in use")

    def _usable(self, number: int) -> bool:
        return address_of(self._subnet, number) not in self._retired and links.find(self._route, self.names.link(number)) is None

    def _make_number(self, number: int) -> Slot:
        link, address = self.names.link(number), address_of(self._subnet, number)
        fd, inner = namespaces.in_fresh_thread(lambda: (namespaces.new_network_namespace(), Socket()))
        try:
            with inner:
                near = links.End(link, GATEWAY_MAC)
                far = links.End(GUEST_LINK, guest_mac(address))
                self._route.ask(links.add_veth(near, far, fd, mtu=self._mtu))
                self._wire_host(link, address, far.mac)
                self._wire_guest(inner, address)
            self._need_nft().run(ruleset.slot_elements(self.names, "add", [(link, address)]))
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                self._route.ask(links.delete_link(link))
            raise
        self._open_fds.add(number)
        return Slot(number, link, address, fd)

    def _wire_host(self, link: str, address: str, hardware: str) -> None:
        found = links.find(self._route, link)
        if found is None:
            raise OSError(errno.ENODEV, f"{link} has vanished")
        self._route.batch(
            [
                links.no_ipv6_address(found.index),
                links.set_up(found.index),
                links.add_route(found.index, address),
                links.add_neighbour(found.index, address, hardware),
            ]
        )

    def _wire_guest(self, inner: Socket, address: str) -> None:
        found = {link.name: link.index for link in links.list_all(inner)}
        eth = found[GUEST_LINK]
        inner.batch(
            [
                links.set_up(found["lo"]),
                links.no_ipv6_address(eth),
                links.set_up(eth),
                links.add_address(eth, address),
                links.add_route(eth, self.gateway_address),
                links.add_route(eth, None, via=self.gateway_address),
                links.add_neighbour(eth, self.gateway_address, GATEWAY_MAC),
            ]
        )

    def _assign(self, slot: Slot, placement_id: str, egress: Egress) -> None:
        self._route.ask(links.set_alias(slot.link, placement_id))
        if opened := ruleset.egress_elements(self.names, "add", slot.address, egress):
            self._need_nft().run(opened)

    def _remove(self, number: int, address: str) -> None:
        with Socket() as route:
            route.ask(links.delete_link(self.names.link(number)))
        self._drop_orphans()
        self._retired.add(address)
        if len(self._retired) >= _RETIRED_MAX:
            self._forget_retired()

    def _drop_orphans(self) -> None:
        """Delete every element of a slot whose interface does not exist.

        Elements are read first: an interface appears before its elements, so one that is found without an interface has lost it.
        """
        found = [
            (name, text) for name in ruleset.SETS for text in map(ruleset.element_text, self._need_nft().elements(self.names.table, name))
        ]
        present = {address_of(self._subnet, number) for number in self.existing()}
        doomed = "".join(ruleset.drop_elements(self.names, name, [text]) for name, text in found if not present & set(text.split(" . ")))
        if doomed:
            self._need_nft().run(doomed)

    def _forget_retired(self) -> None:
        if self._retired:
            conntrack.forget(self._retired)
            self._retired.clear()

    def _checks(self) -> dict[str, str | None]:
        has_table = self.names.table in self._need_nft().tables()
        has_gateway = links.find(self._route, self.names.gateway_link) is not None
        forwards = _IP_FORWARD.read_text().strip() == "1"
        return {
            "net.nft": None if has_table else f"the nftables table {self.names.table} is gone",
            "net.gateway": None if has_gateway else f"the gateway device {self.names.gateway_link} is gone",
            "net.forwarding": None if forwards else "net.ipv4.ip_forward is 0",
            "net.slots": f"slots cannot be made: {self.last_refill_error}" if self.last_refill_error else None,
        }
