"""Control's composition root: one process, uvicorn with uvloop and httptools on loopback, SQLite below ATOLL_HOME. Where the operator has
said so (`control.toml`), a second listener speaks TLS with hosts and clients of other machines.

Where `secrets/database.url` names a PostgreSQL database, any number of such processes serve it, each with a port of its own.
Runs as the unprivileged user; everything that it needs is in `secrets/`, `control/` and `config.toml`. A database that another process
holds, or that is broken, ends it with a line that says so: the supervisor tries again, slower each time.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from atoll.base.errors import AtollError, Code, Refused
from atoll.programs import control_config, instance
from atoll.programs.clock import SteadyClock
from atoll.programs.identity import boot_id
from atoll.programs.layout import Layout, bin_directory, cache_directory, layout_of
from atoll.programs.machines import Machines
from atoll.programs.peering import HttpLine
from atoll.programs.settling import settle_down
from atoll.telemetry import events
from atoll.telemetry.log import configure, get_logger

if TYPE_CHECKING:
    import uvicorn

    from atoll.control.artifacts.machines import MachineSource
    from atoll.control.builds.workshop import Connect, Inside
    from atoll.control.compose import Control
    from atoll.control.replicas.peers import Line
    from atoll.control.settings import ControlSettings
    from atoll.control.wellknown import Joining
    from atoll.programs.secure import App

NAME: Final = "control"
BACKLOG: Final = 2048
KEEP_ALIVE_S: Final = 75
GRACE_S: Final = 5
STEP_S: Final = 2.0
"""A clock that was set by less than this is left as it is."""
STEP_LOOK_S: Final = 30.0

LISTEN_VARIABLE: Final = "ATOLL_CONTROL_LISTEN"
ADDRESS_VARIABLE: Final = "ATOLL_CONTROL_ADDRESS"

log = get_logger()


@dataclass(frozen=True, slots=True)
class Door:
    """Where this replica listens, and where the others reach it."""

    host: str
    port: int
    address: str


def door(config: instance.Config, environ: Mapping[str, str] = os.environ) -> Door:
    """By default the instance's own port on loopback. ATOLL_CONTROL_LISTEN (`host:port`) is for further replicas, ATOLL_CONTROL_ADDRESS
    for those that others reach under another name. *Errors*: Refused INVALID_REQUEST.
    """
    listen = environ.get(LISTEN_VARIABLE) or f"127.0.0.1:{config.control_port}"
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise Refused(Code.INVALID_REQUEST, f"{LISTEN_VARIABLE}={listen} is not host:port")
    address = environ.get(ADDRESS_VARIABLE) or f"http://{listen}"
    if not address.startswith(("http://", "https://")):
        raise Refused(Code.INVALID_REQUEST, f"{ADDRESS_VARIABLE}={address} is not http:// or https://")
    return Door(host, int(port), address.rstrip("/"))


def settings(
    place: Layout, config: instance.Config, entry: Door, *, stepped_s: Callable[[], float] = lambda: 0.0, line: Line | None = None
) -> ControlSettings:
    """What control is told. *Errors*: Refused SETUP_FAILED when a secret is missing or empty."""
    from atoll.control.settings import ControlSettings

    decided = control_config.load(place)
    for name in instance.SECRETS:
        _require_secret(place.secrets / name)
    return ControlSettings(
        database=place.database,
        secrets=place.secrets,
        artifacts=cache_directory() / "templates",
        install_id=config.install_id,
        domain=config.domain,
        version=version("atoll"),
        images=place.blobs,
        image_program=bin_directory() / "atoll-io",
        registries=decided.registries.options(),
        machines=_machines(config),
        bucket=decided.artifacts,
        inside=_inside(f"http://127.0.0.1:{config.port}"),
        bootstrap=place.bootstrap,
        boot_id=boot_id(),
        stepped_s=stepped_s,
        auto_activate=decided.auto_activate,
        joining=_joining(decided),
        address=entry.address,
        line=line,
        machine=socket.gethostname()[:64],
        telemetry={name: value for name, value in os.environ.items() if name.startswith("OTEL_")},
    )


def _machines(config: instance.Config) -> MachineSource | None:
    """What hosts' virtual machines are to boot by, where this machine's set-up was asked for what they need."""
    from atoll.control.artifacts.machines import MachineSource

    if config.machines is Machines.OFF:
        return None
    return MachineSource(cache_directory(), bin_directory() / "atoll-guest", version("atoll"), os.uname().machine)


def _inside(edge: str) -> Connect:
    """How builds reach their sandboxes: through this machine's edge."""

    def connect(sandbox_id: str, token: str) -> Inside:
        # An instance that builds nothing does without the client.
        from atoll.programs.inside import connected

        return connected(edge, sandbox_id, token)

    return connect


def _joining(decided: control_config.ControlConfig) -> Joining:
    from atoll.control.wellknown import Joining

    authority = decided.listener.authority if decided.listener is not None else None
    try:
        pem = authority.read_text() if authority is not None else None
    except OSError as error:
        raise Refused(
            Code.SETUP_FAILED, f"{authority} cannot be read: {error.strerror}", hint="`atoll control listen` makes it."
        ) from error
    return Joining(urls=decided.urls, region=decided.region, ca_pem=pem)


def _require_secret(path: Path) -> None:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Refused(
            Code.SETUP_FAILED, f"{path} cannot be read: {error.strerror}", hint="Run `atoll up`, which makes what is missing."
        ) from error
    if not content.strip():
        raise Refused(Code.SETUP_FAILED, f"{path} is empty", hint="Remove it and run `atoll up`.")


def main() -> None:
    """Serve until SIGTERM."""
    configure(NAME, os.environ.get("ATOLL_LOG_LEVEL", "info"))
    place = layout_of()
    try:
        config = instance.load(place)
        serve(place, config)
    except AtollError as error:
        log.error(events.PROCESS_FAILED, code=error.code, message=error.message, hint=error.hint)  # noqa: TRY400 - the message is all of it
        sys.exit(1)


def serve(place: Layout, config: instance.Config) -> None:
    """Build it and run it."""
    import uvicorn

    from atoll.control.compose import Control
    from atoll.control.opening import DATABASE_URL
    from atoll.programs.migration import migrate_apart
    from atoll.store import backup

    entry = door(config)
    shared = (place.secrets / DATABASE_URL).exists()
    if not shared:
        # A restore that was prepared comes first: what is migrated is what will be opened.
        backup.put_in_place(place.database)
        migrate_apart(place.database)
    # A replica that was given a place of its own is reached there; the listener of `control.toml` is the instance's own.
    listener = None if os.environ.get(LISTEN_VARIABLE) else control_config.load(place).listener
    clock = SteadyClock()
    stepped_s = clock.stepped_s if not shared else lambda: 0.0
    line = HttpLine()
    control = Control(settings(place, config, entry, stepped_s=stepped_s, line=line), clock=clock, dice=os.urandom)
    failure: list[BaseException] = []

    @asynccontextmanager
    async def lifespan(_app: Any) -> AsyncIterator[None]:
        await control.start()
        settle_down()
        log.info(events.PROCESS_STARTED, pid=os.getpid(), port=entry.port, address=entry.address)
        # Replicas of a shared database count by its clock: a step of this machine's moves nothing.
        watches = [] if shared else [_end_when_the_clock_was_set(clock, server)]
        watches.append(_end_when_outlived(control, server))
        listens = [] if listener is None else [_secure(control.app, listener)]
        beside = [asyncio.create_task(work) for work in (*watches, *listens)]
        try:
            yield
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            log.info(events.PROCESS_STOPPING)
            await control.stop()
            await line.close()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await control.app(scope, receive, send)
            return
        await _lifespan(lifespan(app), receive, send, failure)

    server = uvicorn.Server(_plain(app, entry))
    try:
        server.run()
    except SystemExit:
        # A failed start makes uvicorn end the process before what failed can say its code and what to do.
        if not failure:
            raise
    if failure:
        raise failure[0]
    log.info(events.PROCESS_STOPPED)


def _plain(app: App, entry: Door) -> uvicorn.Config:
    """How control answers in clear: on loopback, unless the operator says otherwise."""
    import uvicorn

    from atoll.programs.corking import CorkedHttp

    return uvicorn.Config(
        app,
        host=entry.host,
        port=entry.port,
        loop="uvloop",
        http=CorkedHttp,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )


async def _secure(app: App, listener: control_config.Listener) -> None:
    from atoll.programs.secure import Secure

    await Secure(app, listener, keep_alive_s=KEEP_ALIVE_S, grace_s=GRACE_S, backlog=BACKLOG).run()


async def _end_when_the_clock_was_set(clock: SteadyClock, server: uvicorn.Server) -> None:
    """End in order, so that the next process begins with the new time, once a step of the wall clock has stood for two looks."""
    before_s = 0.0
    while True:
        await asyncio.sleep(STEP_LOOK_S)
        step_s = clock.stepped_s()
        if abs(step_s) > STEP_S and abs(step_s - before_s) < STEP_S:
            log.warning(events.CLOCK_STEPPED, step_s=round(step_s, 3))
            server.should_exit = True
            return
        before_s = step_s


async def _end_when_outlived(control: Control, server: uvicorn.Server) -> None:
    """End in order, so that the next process begins with the store as it is, once that was restored under this one."""
    await control.outlived.wait()
    server.should_exit = True


async def _lifespan(running: Any, receive: Any, send: Any, failure: list[BaseException]) -> None:
    """The ASGI lifespan protocol around a context manager; a failed start is kept, so that it can be told as what it is."""
    await receive()
    try:
        await running.__aenter__()
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - a task boundary: it is raised again by `serve`
        failure.append(error)
        await send({"type": "lifespan.startup.failed", "message": str(error)})
        return
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await running.__aexit__(None, None, None)
    await send({"type": "lifespan.shutdown.complete"})


if __name__ == "__main__":
    main()
