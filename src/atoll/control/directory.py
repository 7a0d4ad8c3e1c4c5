"""Hosts as this replica remembers them: a hint for whom to ask first, never the answer.

Refreshed from the rows at start, at each session or health change, and after each commit that moved a holding.
"""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from atoll.base.units import ZERO, Vector
from atoll.domain.host import Host
from atoll.planning.placing import Advert
from atoll.store import facts, hosts


class Directory:
    """In memory, by host id."""

    def __init__(self) -> None:
        self._adverts: dict[str, Advert] = {}

    def adverts(self) -> Iterable[Advert]:
        """Every host that is known."""
        return self._adverts.values()

    def host(self, host_id: str) -> Host | None:
        """One host's row as last read."""
        advert = self._adverts.get(host_id)
        return advert.host if advert else None

    def load(self, conn: sa.Connection) -> None:
        """Read everything anew; a store function."""
        self._adverts = {host.id: Advert(host, facts.used(conn, host.id)) for host in hosts.all_hosts(conn)}

    def put(self, host: Host, *, used: Vector | None = None) -> None:
        """A host's row has changed."""
        known = self._adverts.get(host.id)
        self._adverts[host.id] = Advert(host, used if used is not None else known.used if known else ZERO)

    def use(self, host_id: str, used: Vector) -> None:
        """What is used of a host has changed."""
        known = self._adverts.get(host_id)
        if known is not None:
            self._adverts[host_id] = Advert(known.host, used)
