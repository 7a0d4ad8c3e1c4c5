"""The supervisor: one detached process per instance that starts control, agent, edge and registry, in that order, and restarts what dies.

Theory of operation. A child is watched through a pidfd, which works alike for a process that this supervisor started and for one that an
earlier supervisor left behind: children are in sessions of their own and write their logs themselves, so the supervisor's death does not
touch them, and the next one adopts whoever is alive. None waits for another to be well. A death is answered by a start, at once the first
time (`restarts.py`). SIGTERM ends the children in order, edge first, control last; sandboxes are not its business and go on. It asks
nothing periodically: it sleeps until a child ends, somebody connects to its socket, or a minute has passed and logs are looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import Code, Refused
from atoll.programs import identity, instance, probes, rotation
from atoll.programs.children import ChildSpec, fingerprint, mark, specs
from atoll.programs.launch import ALREADY_RUNS
from atoll.programs.layout import PROCESSES, Layout
from atoll.programs.restarts import Restarts
from atoll.programs.users import account
from atoll.telemetry import events
from atoll.telemetry.log import get_logger

NAME: Final = "supervisor"
READY_S: Final = {"control": 30.0, "agent": 20.0, "edge": 15.0, "registry": 15.0}
_READY_POLL_S: Final = 0.05
_ROTATE_EVERY_S: Final = 60.0
_REQUEST_BYTES_MAX: Final = 4096

log = get_logger()


@dataclass(slots=True)
class Child:
    """A child and what became of it so far."""

    spec: ChildSpec
    restarts: Restarts = field(default_factory=Restarts)
    process: subprocess.Popen[bytes] | None = None
    running: identity.Identity | None = None
    started_boot_s: float = 0.0
    last_end: str | None = None


class Supervisor:
    """Keeps `children` alive until it is told to stop."""

    def __init__(self, layout: Layout, children: list[ChildSpec], config: instance.Config | None) -> None:
        self._layout = layout
        self._config = config
        self._children = {spec.name: Child(spec) for spec in children}
        self._stopping = asyncio.Event()
        self._started_at = time.time()
        self._fingerprint = fingerprint()

    async def run(self) -> None:
        """Until SIGTERM, SIGINT or a stop over the socket. *Errors*: Refused ALREADY_RUNNING when another supervisor has this instance."""
        with self._locked():
            await self._run()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        mine = identity.of(os.getpid())
        assert mine is not None
        identity.write(self._layout.pid_file(NAME), mine, mark=self._fingerprint)
        log.info(events.PROCESS_STARTED, pid=os.getpid(), home=str(self._layout.home))
        server = await self._serve()
        tasks: list[asyncio.Task[None]] = []
        rotator = asyncio.create_task(self._rotate())
        try:
            for child in self._children.values():
                if self._stopping.is_set():
                    break
                # None waits for another to be well: the agent has ends to enforce, and the edge routes to serve, whatever keeps control.
                started = asyncio.Event()
                tasks.append(asyncio.create_task(self._keep(child, started)))
                await self._first(started.wait(), self._stopping.wait())
                tasks.append(asyncio.create_task(self._tell_when_ready(child)))
            await self._stopping.wait()
        finally:
            self._stopping.set()
            log.info(events.PROCESS_STOPPING)
            await self._end_all()
            rotator.cancel()
            await asyncio.gather(*tasks, rotator, return_exceptions=True)
            server.close()
            with contextlib.suppress(FileNotFoundError):
                self._layout.socket.unlink()
            log.info(events.PROCESS_STOPPED)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._layout.lock_file(NAME).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Refused(Code.ALREADY_RUNNING, f"another supervisor runs {self._layout.home}") from None
            yield

    # one child
    async def _keep(self, child: Child, started: asyncio.Event) -> None:
        while not self._stopping.is_set():
            adopted = identity.living(self._layout.pid_file(child.spec.name))
            if adopted is None:
                await self._start(child)
            else:
                child.running, child.process = adopted, None
                child.started_boot_s = adopted.started_ticks / os.sysconf("SC_CLK_TCK")
                log.info(events.CHILD_ADOPTED, name=child.spec.name, pid=adopted.pid)
            started.set()
            end = await self._ended(child)
            ran_s = time.clock_gettime(time.CLOCK_BOOTTIME) - child.started_boot_s
            child.last_end, child.running, child.process = end, None, None
            if self._stopping.is_set():
                return
            if end == f"exit {ALREADY_RUNS}":
                continue
            child.restarts = child.restarts.died(ran_s=ran_s)
            delay_s = child.restarts.delay_s
            log.warning(events.CHILD_ENDED, name=child.spec.name, reason=end, restarts=child.restarts.total, delay_s=delay_s)
            if delay_s:
                await self._first(asyncio.sleep(delay_s), self._stopping.wait())

    async def _start(self, child: Child) -> None:
        spec, layout = child.spec, self._layout
        command = [sys.executable, "-P", "-m", "atoll.programs.launch"]
        command += ["--pid-file", str(layout.pid_file(spec.name)), "--lock", str(layout.lock_file(spec.name))]
        command += ["--mark", mark(layout, spec.name, self._fingerprint)]
        if spec.user is not None:
            command += ["--user", spec.user]
        if spec.show is not None:
            command += ["--show", *spec.show]
        with layout.log_file(spec.name).open("ab") as output:
            child.process = subprocess.Popen(  # noqa: ASYNC220 - it returns when the launcher has begun
                [*command, "--", *spec.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(spec.environment),
                cwd="/",
                start_new_session=True,
            )
        child.running = identity.of(child.process.pid)
        child.started_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        log.info(events.CHILD_STARTED, name=spec.name, pid=child.process.pid)

    async def _ended(self, child: Child) -> str:
        """Wait for the end of the child, and say how it ended as far as one can know."""
        if child.running is not None:
            await _gone(child.running)
        if child.process is None:
            return "unknown (adopted)"
        status = child.process.wait()
        return f"signal {-status}" if status < 0 else f"exit {status}"

    async def _tell_when_ready(self, child: Child) -> None:
        """Log that the child is well, or that it is not in its time."""
        name = child.spec.name
        if self._config is None or self._stopping.is_set():
            return
        deadline = time.monotonic() + READY_S.get(name, 10.0)
        while time.monotonic() < deadline and not self._stopping.is_set():
            view = await asyncio.to_thread(probes.look, name, self._layout, self._config)
            if view.healthy:
                log.info(events.CHILD_READY, name=name)
                return
            await self._first(asyncio.sleep(_READY_POLL_S), self._stopping.wait())
        if not self._stopping.is_set():
            log.warning(events.CHILD_NOT_READY, name=name)

    # the end
    async def _end_all(self) -> None:
        order = [child for name in ("registry", "edge", "agent", "control") if (child := self._children.get(name))]
        order = [child for child in self._children.values() if child not in order] + order
        for child in order:
            await end_process(child.running or identity.living(self._layout.pid_file(child.spec.name)), child.spec.grace_s, child.spec.name)

    @staticmethod
    async def _first(*waits: Any) -> None:
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _rotate(self) -> None:
        while True:
            await asyncio.sleep(_ROTATE_EVERY_S)
            for name in (*PROCESSES, NAME):
                try:
                    if rotation.rotate(self._layout.log_file(name)):
                        log.info(events.LOG_ROTATED, name=name)
                except OSError as error:
                    log.warning(events.LOG_ROTATED, name=name, error=str(error))

    # the socket
    async def _serve(self) -> asyncio.Server:
        with short_path(self._layout.socket) as path:
            Path(path).unlink(missing_ok=True)
            previous = os.umask(0o177)
            try:
                return await asyncio.start_unix_server(self._answer, path=path, limit=_REQUEST_BYTES_MAX)
            finally:
                os.umask(previous)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(5.0):
                request = json.loads(await reader.readline())
            answer = self._carry_out(request if isinstance(request, dict) else {})
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except (ValueError, TimeoutError, ConnectionError, asyncio.LimitOverrunError) as error:
            log.debug(events.REQUEST_FAILED, error=str(error))
        finally:
            writer.close()

    def _carry_out(self, request: dict[str, Any]) -> dict[str, Any]:
        match request.get("ask"):
            case "status":
                return self._status()
            case "stop":
                self._stopping.set()
                return {"ok": True}
            case "restart":
                child = self._children.get(str(request.get("name")))
                if child is None or child.running is None:
                    return {"ok": False, "error": "no such running process"}
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.running.pid, signal.SIGTERM)
                return {"ok": True, "pid": child.running.pid}
            case other:
                return {"ok": False, "error": f"unknown request {other!r}"}

    def _status(self) -> dict[str, Any]:
        return {
            "ok": True,
            "pid": os.getpid(),
            "started_at": self._started_at,
            "fingerprint": self._fingerprint,
            "children": {
                name: {
                    "pid": child.running.pid if child.running else None,
                    "adopted": child.running is not None and child.process is None,
                    "last_end": child.last_end,
                    **asdict(child.restarts),
                }
                for name, child in self._children.items()
            },
        }


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name of a socket that is always short enough for the kernel (107 bytes), however deep its directory."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


async def _gone(process: identity.Identity) -> None:
    """Wait until exactly this process has ended; whose child it is does not matter."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    try:
        # The pid may have passed to another process between the look and the open.
        if not process.alive():
            return
        loop.add_reader(descriptor, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def end_process(process: identity.Identity | None, grace_s: float, name: str) -> None:
    """End a process: ask, wait, then kill. *Idempotency*: nothing to do when it has ended."""
    if process is None or not process.alive():
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)
    try:
        async with asyncio.timeout(grace_s):
            await _gone(process)
    except TimeoutError:
        log.warning(events.CHILD_KILLED, name=name, pid=process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        await _gone(process)


def main() -> None:
    """Run in the foreground; `up` starts this detached."""
    from atoll.programs.layout import layout_of
    from atoll.telemetry.log import configure

    configure(NAME, os.environ.get("ATOLL_LOG_LEVEL", "info"))
    layout = layout_of()
    config = instance.load(layout)
    user = account() if os.geteuid() == 0 else None
    try:
        asyncio.run(Supervisor(layout, specs(layout, user), config).run())
    except Refused as error:
        log.error(events.PROCESS_FAILED, code=error.code, message=error.message)  # noqa: TRY400 - the message is all of it
        sys.exit(1)


if __name__ == "__main__":
    main()
