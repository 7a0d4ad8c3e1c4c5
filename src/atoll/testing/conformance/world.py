"""The world outside: a namespace with an address from a range for documentation, which the host routes to, and servers in it."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from atoll.hostops import links, namespaces
from atoll.hostops.netlink import Socket

_FAR_MAC: Final = "02:c0:00:00:00:02"
_NEAR_MAC: Final = "02:c0:00:00:00:01"
_ACCEPT_S: Final = 0.2
DNS_PORT: Final = 53


def _listen(address: str, port: int) -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((address, port))
    server.listen(16)
    server.settimeout(_ACCEPT_S)
    return server


def _datagrams(address: str, port: int) -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, port))
    server.settimeout(_ACCEPT_S)
    return server


@dataclass(slots=True)
class _Servers:
    """Sockets that answer until they are closed."""

    stop: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)

    def serve(self, sock: socket.socket) -> None:
        work = self._tcp if sock.type == socket.SOCK_STREAM else self._udp
        thread = threading.Thread(target=work, args=(sock,), daemon=True)
        thread.start()
        self.threads.append(thread)

    def _tcp(self, sock: socket.socket) -> None:
        with sock:
            while not self.stop.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = sock.accept()
                    with connection:
                        connection.sendall(b"world\n")

    def _udp(self, sock: socket.socket) -> None:
        with sock:
            while not self.stop.is_set():
                with contextlib.suppress(OSError):
                    _, (source, port) = sock.recvfrom(512)
                    self.heard.append(source)
                    sock.sendto(b"world\n", (source, port))

    def close(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()


class Holding:
    """A server that says nothing, and listens to whoever has come first until that connection ends."""

    def __init__(self, server: socket.socket) -> None:
        self._server, self.port = server, int(server.getsockname()[1])
        self._peer: socket.socket | None = None
        self._lock = threading.Lock()
        server.settimeout(None)

    def heard(self, within_s: float) -> str:
        """What it hears next, as text; `""` at the end of a connection, `reset` when it is broken off, `nothing` within this time."""
        with self._lock:
            if self._peer is None:
                self._server.settimeout(within_s)
                self._peer, _ = self._server.accept()
            self._peer.settimeout(within_s)
            try:
                return self._peer.recv(64).decode()
            except ConnectionResetError:
                return "reset"
            except TimeoutError:
                return "nothing"

    def close(self) -> None:
        for one in (self._server, self._peer):
            if one is not None:
                one.close()


class NamespaceWorld:
    """A World in a network namespace of its own, behind a veth pair."""

    def __init__(self, fd: int, number: int, gateway_address: str) -> None:
        self._fd = fd
        self._gateway_address = gateway_address
        base = f"203.0.113.{number * 4}"
        self.host_address = base.rsplit(".", 1)[0] + f".{number * 4 + 1}"
        self.address = base.rsplit(".", 1)[0] + f".{number * 4 + 2}"
        self.tcp_port = 8080
        self.udp_port = 9090
        self.host_port = 0
        self._inside = _Servers()
        self._outside = _Servers()

    def open(self) -> None:
        for sock in namespaces.in_network_namespace(self._fd, self._sockets):
            self._inside.serve(sock)
        server = _listen("0.0.0.0", 0)
        self.host_port = server.getsockname()[1]
        self._outside.serve(server)

    def _sockets(self) -> list[socket.socket]:
        return [
            _listen("0.0.0.0", self.tcp_port),
            _datagrams("0.0.0.0", self.udp_port),
            _listen("0.0.0.0", DNS_PORT),
            _datagrams("0.0.0.0", DNS_PORT),
        ]

    def close(self) -> None:
        self._inside.close()
        self._outside.close()

    def heard_from(self) -> Sequence[str]:
        return list(self._inside.heard)

    def reaches(self, address: str, port: int) -> bool:
        def connect() -> bool:
            with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=2.0):
                return True
            return False

        return namespaces.in_network_namespace(self._fd, connect)

    @contextlib.contextmanager
    def holding(self) -> Iterator[Holding]:
        server = namespaces.in_network_namespace(self._fd, lambda: _listen("0.0.0.0", 0))
        made = Holding(server)
        try:
            yield made
        finally:
            made.close()

    @contextlib.contextmanager
    def resolver(self) -> Iterator[None]:
        servers = _Servers()
        servers.serve(_listen(self._gateway_address, DNS_PORT))
        servers.serve(_datagrams(self._gateway_address, DNS_PORT))
        try:
            yield
        finally:
            servers.close()


@contextlib.contextmanager
def world(gateway_address: str) -> Iterator[NamespaceWorld]:
    """Make a world, and take it away again. Needs root."""
    number = random.randrange(1, 64)
    name = f"cw{os.getpid() % 100000}x{number}"
    fd, inner = namespaces.in_fresh_thread(lambda: (namespaces.new_network_namespace(), Socket()))
    made = NamespaceWorld(fd, number, gateway_address)
    with Socket() as route:
        try:
            with inner:
                route.ask(links.add_veth(links.End(name, _NEAR_MAC), links.End("eth0", _FAR_MAC), fd))
                near = links.find(route, name)
                assert near is not None
                route.batch(
                    [links.set_up(near.index), links.add_address(near.index, made.host_address), links.add_route(near.index, made.address)]
                )
                far = {link.name: link.index for link in links.list_all(inner)}
                inner.batch(
                    [
                        links.set_up(far["lo"]),
                        links.set_up(far["eth0"]),
                        links.add_address(far["eth0"], made.address),
                        links.add_route(far["eth0"], made.host_address),
                        links.add_route(far["eth0"], None, via=made.host_address),
                    ]
                )
            made.open()
            yield made
        finally:
            made.close()
            route.ask(links.delete_link(name))
            os.close(fd)
