"""How control's builds speak to the inside of their sandboxes: by the guest's contract through the edge, as any client does.

The client is synchronous, so each call has a thread of its own here; when nobody waits for it any more, the end of its sandbox ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from atoll.base.errors import AtollError, Code, Refused
from atoll.client.guest import Ended as GuestEnded
from atoll.client.guest import Guest, Output
from atoll.control.artifacts.imports import free_bytes
from atoll.control.builds.port import Ended, Told

T = TypeVar("T")

SPARE_BYTES: Final = 1 << 30
"""Of its disk, which control keeps for itself."""
LINE_BYTES_MAX: Final = 64 << 10
_LEVELS: Final = {"stdout": "info", "stderr": "warn"}


def connected(edge: str, sandbox_id: str, token: str) -> InsideGuest:
    """`edge`: its address, e.g. `http://127.0.0.1:3000`."""
    return InsideGuest(Guest(edge, sandbox_id, token), ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"inside {sandbox_id}"))


@dataclass(slots=True)
class InsideGuest:
    """Implements control.builds.workshop.Inside."""

    guest: Guest
    threads: ThreadPoolExecutor

    async def run(
        self, command: Sequence[str], *, user: str, cwd: str | None, env: Mapping[str, str], timeout_s: float, told: Told
    ) -> Ended:
        """See Inside."""
        loop = asyncio.get_running_loop()
        lines = {name: Lines(lambda line, level=level: loop.call_soon_threadsafe(told, level, line)) for name, level in _LEVELS.items()}  # type: ignore[misc]

        def work() -> Ended:
            with self.guest.start(list(command), user=user, cwd=cwd, env=env, timeout_s=timeout_s) as events:
                for event in events:
                    match event:
                        case Output():
                            lines[event.stream].feed(event.data)
                        case GuestEnded():
                            for one in lines.values():
                                one.end()
                            return Ended(event.exit_code, None)
                        case _:
                            pass
            return Ended(None, "the command's output ended before the command did")

        try:
            ended = await self._in_thread(work)
        except Refused as error:
            if error.code is Code.SANDBOX_NOT_FOUND:
                raise
            return Ended(None, _said(error, timeout_s))
        # What was told from the thread comes before what follows from the end.
        await asyncio.sleep(0)
        return ended

    async def put(self, path: str, source: Path) -> None:
        """See Inside."""

        def work() -> None:
            with source.open("rb") as file:
                self.guest.write(path, file, user="root", size=source.stat().st_size)

        await self._in_thread(work)

    async def get(self, path: str, target: Path) -> None:
        """See Inside."""

        def work() -> None:
            with self.guest.read(path, user="root") as (size, parts), target.open("wb") as file:
                room = free_bytes(target.parent) - SPARE_BYTES
                if size is not None and size > room:
                    raise Refused(Code.HOST_DISK_FULL, f"{size} bytes do not fit where {max(room, 0)} are free for them")
                for part in parts:
                    room -= len(part)
                    if room < 0:
                        raise Refused(Code.HOST_DISK_FULL, "what is copied from a stage does not fit on control's disk")
                    file.write(part)

        await self._in_thread(work)

    async def close(self) -> None:
        """See Inside."""
        with contextlib.suppress(OSError):
            self.guest.close()
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)


@dataclass(slots=True)
class Lines:
    """Output as it comes, told line by line."""

    tell: Callable[[str], object]
    rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> None:
        """More of it; a line that never ends is cut."""
        self.rest += data
        while (at := self.rest.find(b"\n")) >= 0 or len(self.rest) > LINE_BYTES_MAX:
            end = at if at >= 0 else LINE_BYTES_MAX
            self.tell(bytes(self.rest[:end]).decode(errors="replace").rstrip("\r"))
            del self.rest[: end + (1 if at >= 0 else 0)]

    def end(self) -> None:
        """There is no more."""
        if self.rest:
            self.tell(bytes(self.rest).decode(errors="replace").rstrip("\r"))
            self.rest.clear()


_CODES: Final = {Code.UNAUTHENTICATED: "unauthenticated", Code.INVALID_REQUEST: "invalid_argument", Code.END_REACHED: "deadline_exceeded"}


def _said(error: AtollError, timeout_s: float) -> str:
    """The guest's refusal in the words of its contract, which E2B's clients know."""
    name = _CODES.get(error.code)
    message = f"it took longer than {timeout_s:g} s" if error.code is Code.END_REACHED else error.message
    return message if name is None else f"{name}: {message}"
