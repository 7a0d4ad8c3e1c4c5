"""Watching guests: one pidfd each, and one call when a guest ends by itself. Costs nothing while nothing happens."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from atoll.hostops import processes

Ended = Callable[[str, str | None], None]
"""`ended(placement_id, how)`: `exit 1`, `signal 9`, or None when the kernel cannot say."""


class Watches:
    """Which placements' guests are watched by this run."""

    def __init__(self, ended: Ended) -> None:
        self._ended = ended
        self._pidfds: dict[str, int] = {}

    def __contains__(self, placement_id: str) -> bool:
        return placement_id in self._pidfds

    def watch(self, placement_id: str, pid: int) -> None:
        """Call `ended` once when this process ends, at once when it has ended. *Idempotency*: one watch per placement."""
        if placement_id in self._pidfds:
            return
        loop = asyncio.get_running_loop()
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            loop.call_soon(self._ended, placement_id, None)
            return
        self._pidfds[placement_id] = pidfd
        loop.add_reader(pidfd, self._readable, placement_id, pid, pidfd)

    def unwatch(self, placement_id: str) -> None:
        """Its end is no news any more."""
        pidfd = self._pidfds.pop(placement_id, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        for placement_id in list(self._pidfds):
            self.unwatch(placement_id)

    def _readable(self, placement_id: str, pid: int, pidfd: int) -> None:
        how = processes.exit_reason(pid, pidfd)
        self.unwatch(placement_id)
        self._ended(placement_id, how)
