"""The machine's side of network slots: what `slots.SlotPool` does in its threads. Blocking; no state but open handles and numbers.

A slot is a network namespace that a descriptor holds, a veth pair into it, an address with a route, and elements of nftables sets.
An interface appears before its elements and goes before them, so elements without an interface are orphans: `drop_orphans` deletes
those, whoever left them. Slot numbers go round 1..65,000, so an address comes back late; its connections are forgotten before.
Others change this machine's firewall, too (`nft flush ruleset` is how many a script begins): what slots may reach is remembered, and a
table that is gone is written again, by `mend` and by whoever meets it first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.drivers.oci import ruleset
from atoll.drivers.oci.config import Names
from atoll.drivers.oci.ruleset import Egress
from atoll.hostops import conntrack, links, namespaces, resets, sockets
from atoll.hostops.netlink import Socket
from atoll.hostops.nft import Nft, NftError

SLOTS_MAX: Final = 65_000
RETIRED_MAX: Final = 64
RESETS_MAX: Final = 4096
"""Far ends that are told at a time: each answers, and a host is not to be flooded by what one guest has left."""
GUEST_LINK: Final = "eth0"
GATEWAY_MAC: Final = "02:a7:00:00:00:01"
IP_FORWARD: Final = Path("/proc/sys/net/ipv4/ip_forward")


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


class SlotWorks:
    """Makes and removes slots. `make` and `assign` are for one thread, everything else for any."""

    def __init__(self, names: Names, *, subnet: int, closed: tuple[str, ...], mtu: int) -> None:
        self.names = names
        self.gateway_address = gateway_of(subnet)
        self._subnet = subnet
        self._closed = closed
        self._mtu = mtu
        self._next = random.randrange(1, SLOTS_MAX)
        self._nft = Nft()
        self._route = Socket()
        self._writing = threading.RLock()
        """Around what reads the machine and then writes the table, so that no change falls in between."""
        self._opened: dict[str, str] = {}
        """address → commands that open what its slot may reach."""
        self._retiring = threading.Lock()
        self._retired: set[str] = set()
        """Addresses whose connections are not forgotten yet."""

    def close(self) -> None:
        """Let go of handles; nothing on the machine changes."""
        self._route.close()
        self._nft.close()

    # -- what all slots share

    def set_up(self) -> None:
        """Have the gateway, the table and forwarding; remove what an earlier run had made ahead."""
        gateway = self._gateway_link()
        self._route.batch([links.no_ipv6_address(gateway), links.set_up(gateway), links.add_address(gateway, self.gateway_address)])
        if IP_FORWARD.read_text().strip() != "1":
            IP_FORWARD.write_text("1")
        # What an earlier run had ready and nobody took: its namespaces end with it, their interfaces a moment later.
        self._route.batch([links.delete_link(self.names.link(number)) for number, owner in self.existing().items() if not owner])
        self._remember_opened()
        self._write_table()

    def tear_down(self) -> None:
        """Remove the table and the gateway, when no slot needs them any more."""
        if not self.existing():
            self.forget_retired()
            with contextlib.suppress(NftError):
                self._nft.run(f"delete table {self.names.table}")
            self._route.ask(links.delete_link(self.names.gateway_link))

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
        """Write the table anew, in one transaction with the elements of the slots that exist."""
        with self._writing:
            present = {self.address(number): self.names.link(number) for number in self.existing()}
            slots = ruleset.slot_elements(self.names, "add", ((link, address) for address, link in present.items()))
            opened = "".join(commands for address, commands in self._opened.items() if address in present)
            subnet = f"10.{64 + self._subnet}.0.0/16"
            table = ruleset.table_text(self.names, subnet=subnet, gateway=self.gateway_address, closed=self._closed)
            self._nft.run(table + slots + opened)

    def _remember_opened(self) -> None:
        """What an earlier run let its slots reach, as the table has it."""
        for name in ruleset.EGRESS_SETS:
            with contextlib.suppress(NftError):  # there is no table, or an older one that lacks a set
                for text in map(ruleset.element_text, self._nft.elements(self.names.table, name)):
                    address = text.partition(" . ")[0]
                    self._opened[address] = self._opened.get(address, "") + ruleset.keep_elements(self.names, name, [text])

    def mend(self) -> bool:
        """Write the table again if somebody has removed it; whether that was so."""
        with self._writing:
            if self.names.table in self._nft.tables():
                return False
            self._write_table()
            return True

    def _change(self, commands: str) -> None:
        """Change elements. *Errors*: NftError."""
        with self._writing:
            try:
                self._nft.run(commands)
            except NftError:
                if not self.mend():
                    raise
                self._nft.run(commands)

    # -- one slot

    def make(self) -> Slot:
        """A new slot: closed, and nobody's. *Errors*: Refused(INSUFFICIENT_SLOTS) when all numbers are used, OSError of the kernel."""
        for number in self._numbers():
            if self.address(number) not in self._retired and links.find(self._route, self.names.link(number)) is None:
                return self._make_number(number)
        raise Refused(Code.INSUFFICIENT_SLOTS, "every network slot number is in use")

    def _numbers(self) -> Iterator[int]:
        """Every number once, from where the last one was."""
        for _ in range(SLOTS_MAX):
            number = self._next
            self._next = number % SLOTS_MAX + 1
            yield number

    def _make_number(self, number: int) -> Slot:
        link, address = self.names.link(number), self.address(number)
        fd, inner = namespaces.in_fresh_thread(lambda: (namespaces.new_network_namespace(), Socket()))
        try:
            with inner:
                near = links.End(link, GATEWAY_MAC)
                far = links.End(GUEST_LINK, guest_mac(address))
                self._route.ask(links.add_veth(near, far, fd, mtu=self._mtu))
                self._wire_host(link, address, far.mac)
                self._wire_guest(inner, address)
            self._change(ruleset.slot_elements(self.names, "add", [(link, address)]))
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                self._route.ask(links.delete_link(link))
            raise
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

    def assign(self, slot: Slot, placement_id: str, egress: Egress) -> None:
        """Write the placement's name on the slot's interface, then open its egress."""
        self._route.ask(links.set_alias(slot.link, placement_id))
        if opened := ruleset.egress_elements(self.names, "add", slot.address, egress):
            with self._writing:
                self._opened[slot.address] = opened
                self._change(opened)

    def remove(self, number: int, address: str) -> None:
        """Remove interface and elements. The address is not used again before its connections are forgotten."""
        with Socket() as route:
            route.ask(links.delete_link(self.names.link(number)))
        # Nobody answers for it any more, and a proxy that only reads would not notice. An old kernel cannot tell it.
        with contextlib.suppress(OSError):
            sockets.abort_to(address)
        self._opened.pop(address, None)
        self.drop_orphans()
        with self._retiring:
            self._retired.add(address)
            full = len(self._retired) >= RETIRED_MAX
        if full:
            self.forget_retired()

    def drop_orphans(self) -> None:
        """Delete every element of a slot whose interface does not exist.

        Elements are read first: an interface appears before its elements, so one that is found without an interface has lost it.
        """
        try:
            found = [
                (name, text) for name in ruleset.SETS for text in map(ruleset.element_text, self._nft.elements(self.names.table, name))
            ]
        except NftError:
            if self.mend():
                return
            raise
        present = {self.address(number) for number in self.existing()}
        doomed = "".join(ruleset.drop_elements(self.names, name, [text]) for name, text in found if not present & set(text.split(" . ")))
        if doomed:
            self._nft.run(doomed)

    def forget_retired(self) -> None:
        """Forget the connections of removed slots, and have whoever is at their far ends hear of it."""
        with self._retiring:
            if not self._retired:
                return
            left: list[conntrack.Connection] = []
            with contextlib.suppress(OSError):  # then they find out when they next send
                left = conntrack.begun_by(self._retired)[:RESETS_MAX]
            conntrack.forget(self._retired)
            self._retired.clear()
        with contextlib.suppress(OSError):
            resets.provoke(left)

    # -- looking

    def address(self, number: int) -> str:
        """The address that belongs to a slot number."""
        return address_of(self._subnet, number)

    def existing(self) -> dict[int, str]:
        """Slots that exist on the machine now, by interface: number → placement id, or "" while nobody has it."""
        with Socket() as route:
            numbered = ((self.names.slot(link.name), link.alias) for link in links.list_all(route))
            return {number: alias for number, alias in numbered if number is not None}

    def checks(self) -> dict[str, str | None]:
        """Self-checks by id: what is wrong, or None."""
        has_table = self.names.table in self._nft.tables()
        with Socket() as route:
            has_gateway = links.find(route, self.names.gateway_link) is not None
        forwards = IP_FORWARD.read_text().strip() == "1"
        others = self._others_that_drop()
        return {
            "net.firewall": f"forwarding is dropped by {', '.join(others)}" if others else None,
            "net.nft": None if has_table else f"the nftables table {self.names.table} is gone",
            "net.gateway": None if has_gateway else f"the gateway device {self.names.gateway_link} is gone",
            "net.forwarding": None if forwards else "net.ipv4.ip_forward is 0",
        }

    def _others_that_drop(self) -> list[str]:
        """Other tables whose forward chain drops what it does not know: accepting a packet in ours does not spare it theirs."""
        return [
            f"{chain['family']} {chain['table']} {chain['name']}"
            for chain in self._nft.chains()
            if chain.get("hook") == "forward"
            and chain.get("policy") == "drop"
            and f"{chain['family']} {chain['table']}" != self.names.table
        ]
