"""What each host says that it holds, put together from a session's polls, and what it should hold, kept between them.

Theory of operation. A host with a thousand placements polls each time that one of them is made, ends or moves; to hear and read all of them
each time would make the next create dearer for each that is there. So a poll names what has changed since an earlier one that was taken in
(`Poll.since`), and what is wanted is read again for those placements only of which a commit has told. Both are memory of one process, and
never more than a copy: who does not know the earlier poll says so and is told the whole, and where other processes write too everything is
read each time. In any case the whole is read again after a while.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa

from atoll.base.clock import Clock
from atoll.store import hosts
from atoll.store.engine import Store
from atoll.store.hints import Shared
from atoll.store.hosts import OnHost, Session
from atoll.wire import agent as wire

READ_AGAIN_S: Final = 60.0
"""How long what is remembered of what is wanted counts."""
TOUCHED_MAX: Final = 128
"""More than so many are read with all the others."""


@dataclass(slots=True)
class Held:
    """What one run of a host's agent has told this process of what the host holds."""

    taken: int | None = None
    """The number of the newest poll that was taken in; None: nothing is known."""
    holds: dict[str, int] = field(default_factory=dict)
    """placement → highest desired revision accepted."""
    ends: dict[str, int] = field(default_factory=dict)
    """placement → revision of the end that the agent enforces."""

    def take(self, poll: wire.Poll) -> bool:
        """Take in what a poll says. False when it tells of changes to what is not known here: then the whole has to be told."""
        if poll.since is None:
            self.holds.clear()
            self.ends.clear()
        elif poll.since != self.taken:
            self.taken = None
            return False
        self.holds.update(poll.holds)
        for placement_id in (*poll.dropped, *(poll.holds.keys() - poll.end_revisions.keys())):
            self.ends.pop(placement_id, None)
        for placement_id in poll.dropped:
            self.holds.pop(placement_id, None)
        self.ends.update(poll.end_revisions)
        self.taken = poll.poll_seq
        return True


@dataclass(slots=True)
class _Known:
    rows: dict[str, OnHost]
    read_at: float
    touched: set[str] = field(default_factory=set)


class Wants:
    """What every host should hold. One per control process."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._alone = not isinstance(store, Shared)
        self._known: dict[str, _Known] = {}

    def touched(self, host_id: str, placement_id: str) -> None:
        """A commit may have changed what is wanted of this placement."""
        known = self._known.get(host_id)
        if known is not None:
            known.touched.add(placement_id)

    async def of(self, host_id: str) -> tuple[Session, Mapping[str, OnHost]]:
        """The host's session and every placement that still holds something of it, as of one moment."""
        return await self._store.read(lambda conn: (hosts.session(conn, host_id), self._read(conn, host_id)))

    def _read(self, conn: sa.Connection, host_id: str) -> Mapping[str, OnHost]:
        """In one go with the reading, so that whatever is told after it is newer than what was read."""
        now = self._clock.boot()
        known = self._known.pop(host_id, None)
        if known is None or now - known.read_at > READ_AGAIN_S or len(known.touched) > TOUCHED_MAX:
            known = _Known({one.placement_id: one for one in hosts.wanted(conn, host_id)}, now)
        elif known.touched:
            found = {one.placement_id: one for one in hosts.wanted_of(conn, host_id, sorted(known.touched))}
            for placement_id in known.touched - found.keys():
                known.rows.pop(placement_id, None)
            known.rows.update(found)
            known.touched.clear()
        if self._alone:
            self._known[host_id] = known
        return known.rows
