"""Cases about slots: what a guest reaches, what reaches it, and under which address."""

from __future__ import annotations

import asyncio

from atoll.domain.spec import NetworkSpec
from atoll.drivers.port import Order
from atoll.testing.conformance.guest import GuestClient
from atoll.testing.conformance.stand import Stand, World, shell

CLOSED = ("169.254.169.254", "10.0.0.1", "172.16.0.1", "192.168.0.1", "100.64.0.1")
_PYTHON = """
import socket, sys
kind, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
try:
    if kind == "tcp":
        with socket.create_connection((host, port), timeout=1.0) as s:
            print("reached", s.recv(64).decode())
    else:
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        s.settimeout(1.0)
        s.sendto(b"ping", (host, port))
        print("reached", s.recv(64).decode())
except OSError as error:
    print("closed", error)
"""


async def _started(stand: Stand, **spec: object) -> tuple[Order, GuestClient, str]:
    order = stand.order(**spec)
    seen = await stand.driver.start(order)
    assert seen.address is not None
    return order, await stand.guest(order, seen), seen.address


async def _reaches(guest: GuestClient, host: str, port: int, *, kind: str = "tcp") -> bool:
    """Whether the guest can reach an address; with Python where the image has it, else with busybox."""
    result = await guest.run(
        ["/bin/sh", "-c", 'command -v python3 >/dev/null && exec python3 -c "$0" "$@"; exit 77', _PYTHON, kind, host, str(port)]
    )
    if result.status == 77:
        flag = "" if kind == "tcp" else "-u "
        result = await shell(guest, f"echo ping | timeout 3 nc {flag}-w 2 {host} {port} | grep -q . && echo reached || echo closed")
    assert result.out.startswith(("reached", "closed")), result.text
    return result.out.startswith("reached")


async def public_addresses_are_open(stand: Stand) -> None:
    async with stand.world() as world:
        order, guest, address = await _started(stand)
        assert await _reaches(guest, world.address, world.tcp_port)
        assert await _reaches(guest, world.address, world.udp_port, kind="udp")
        assert address not in world.heard_from(), "the world sees the host's address, not the slot's"
        await stand.driver.remove(order.placement_id)


async def closed_means_closed(stand: Stand) -> None:
    async with stand.world() as world:
        order, guest, _ = await _started(stand, network=NetworkSpec(internet=False))
        assert not await _reaches(guest, world.address, world.tcp_port)
        assert not await _reaches(guest, world.address, world.udp_port, kind="udp")
        await stand.driver.remove(order.placement_id)


async def rules_open_and_close_single_networks(stand: Stand) -> None:
    async with stand.world() as world:
        here = f"{world.address}/32"
        for network, expected in (
            (NetworkSpec(internet=False, allow_out=(here,)), True),
            (NetworkSpec(internet=True, deny_out=(here,)), False),
            (NetworkSpec(internet=True, deny_out=("0.0.0.0/0",)), False),
            (NetworkSpec(internet=True, allow_out=(here,), deny_out=("0.0.0.0/0",)), True),
        ):
            order, guest, _ = await _started(stand, network=network)
            assert await _reaches(guest, world.address, world.tcp_port) is expected, f"{network}"
            await stand.driver.remove(order.placement_id)


async def private_ranges_and_metadata_are_closed(stand: Stand) -> None:
    order, guest, _ = await _started(stand, network=NetworkSpec(internet=True, allow_out=("0.0.0.0/0",)))
    reached = await asyncio.gather(*(_reaches(guest, host, 80) for host in CLOSED))
    assert not any(reached), dict(zip(CLOSED, reached, strict=True))
    await stand.driver.remove(order.placement_id)


async def the_host_is_closed(stand: Stand) -> None:
    async with stand.world() as world:
        order, guest, _ = await _started(stand)
        for host in (world.host_address, stand.gateway_address):
            assert not await _reaches(guest, host, world.host_port), host
        await stand.driver.remove(order.placement_id)


async def guests_do_not_reach_each_other(stand: Stand) -> None:
    first, one, _ = await _started(stand)
    second, _, address = await _started(stand)
    assert not await _reaches(one, address, 49983)
    for order in (first, second):
        await stand.driver.remove(order.placement_id)


async def the_world_does_not_reach_guests(stand: Stand) -> None:
    async with stand.world() as world:
        order, _, address = await _started(stand)
        assert not world.reaches(address, 49983)
        await stand.driver.remove(order.placement_id)


async def forged_sources_are_dropped(stand: Stand) -> None:
    """A guest that takes another address, or writes one into its packets, is not heard."""
    async with stand.world() as world:
        order, guest, address = await _started(stand)
        forged = address.rsplit(".", 1)[0] + ".250" if not address.endswith(".250") else address.rsplit(".", 1)[0] + ".249"
        before = len(world.heard_from())
        added = await shell(guest, f"ip addr add {forged}/32 dev eth0")
        if added.status == 0:
            await shell(
                guest,
                f'python3 -c \'import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("{forged}", 0)); '
                f's.sendto(b"forged", ("{world.address}", {world.udp_port}))\' || echo forged | nc -u -w 1 -s {forged} {world.address} {world.udp_port}',
            )
        await _raw(guest, world, forged)
        assert len(world.heard_from()) == before, f"heard: {world.heard_from()}"
        assert await _reaches(guest, world.address, world.udp_port, kind="udp"), "its own address still works"
        await stand.driver.remove(order.placement_id)


async def _raw(guest: GuestClient, world: World, forged: str) -> None:
    """Send a datagram whose header says that it comes from elsewhere."""
    script = f"""
import socket, struct
payload = b"raw"
udp = struct.pack(">HHHH", 4000, {world.udp_port}, 8 + len(payload), 0) + payload
ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 1, 0, 64, 17, 0, socket.inet_aton("{forged}"), socket.inet_aton("{world.address}"))
s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
s.sendto(ip + udp, ("{world.address}", 0))
print("sent")
"""
    await guest.run(["/bin/sh", "-c", 'command -v python3 >/dev/null && python3 -c "$0"', script])


async def names_are_asked_at_the_gateway_only(stand: Stand) -> None:
    async with stand.world() as world:
        order, guest, _ = await _started(stand)
        with world.resolver():
            assert await _reaches(guest, stand.gateway_address, 53, kind="udp")
            assert await _reaches(guest, stand.gateway_address, 53)
            assert not await _reaches(guest, world.address, 53, kind="udp"), "another resolver"
        await stand.driver.remove(order.placement_id)
