"""Control's second listener: TLS, for hosts and clients of other machines, beside the plain one on loopback.

Theory of operation. The same application, without what belongs to this machine's own edge. A certificate that cannot be read, or an address
that is taken, is told once and tried again: what answers on loopback must not end for it. The files are looked at every few seconds, and a
changed certificate is what the next handshake shows; connections that are open go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import uvicorn

from atoll.programs.control_config import Listener
from atoll.telemetry import events
from atoll.telemetry.log import get_logger

App = Callable[[Any, Any, Any], Awaitable[None]]

LOOK_S: Final = 5.0
_PRIVATE: Final = "/internal/"
_MISSING: Final = b'{"code":"INVALID_REQUEST","message":"no such call","hint":"This part of control is not for other machines."}'

log = get_logger()


class _Server(uvicorn.Server):
    """Signals are the first server's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Secure:
    """The listener; `run` until cancelled."""

    def __init__(self, app: App, listener: Listener, *, keep_alive_s: int, grace_s: int, backlog: int) -> None:
        self._app = app
        self._listener = listener
        self._keep_alive_s = keep_alive_s
        self._grace_s = grace_s
        self._backlog = backlog
        self._told = ""
        self.listening = asyncio.Event()

    async def run(self) -> None:
        """Serve; whatever keeps it from it is tried again until it is gone."""
        while True:
            try:
                await self._serve()
            except (OSError, ssl.SSLError) as error:
                self._tell(f"{type(error).__name__}: {error}")
            self.listening.clear()
            await asyncio.sleep(LOOK_S)

    def _tell(self, problem: str) -> None:
        if problem != self._told:
            where = f"{self._listener.host}:{self._listener.port}"
            log.error(events.LISTENER_FAILED, address=where, error=problem, path=str(self._listener.certificate))
        self._told = problem

    async def _serve(self) -> None:
        listener = self._listener
        config = uvicorn.Config(
            self._guarded,
            interface="asgi3",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=self._keep_alive_s,
            timeout_graceful_shutdown=self._grace_s,
            ssl_certfile=str(listener.certificate),
            ssl_keyfile=str(listener.key),
        )
        config.load()
        assert config.ssl is not None
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
        with _bound(listener.host, listener.port, self._backlog) as bound:
            server = _Server(config)
            following = asyncio.create_task(self._follow(config.ssl))
            log.info(events.LISTENER_STARTED, address=f"{listener.host}:{listener.port}")
            self._told = ""
            self.listening.set()
            try:
                await server.serve(sockets=[bound])
            except asyncio.CancelledError:
                server.should_exit = True
                await server.shutdown(sockets=[bound])
                raise
            finally:
                following.cancel()

    async def _follow(self, context: ssl.SSLContext) -> None:
        """Show what is in the files now, once it has changed."""
        files = (self._listener.certificate, self._listener.key)
        shown = _stamps(*files)
        while True:
            await asyncio.sleep(LOOK_S)
            now = _stamps(*files)
            if now == shown:
                continue
            try:
                context.load_cert_chain(*files)
            except (OSError, ssl.SSLError) as error:
                # Half of a change: the other file follows.
                self._tell(f"{type(error).__name__}: {error}")
                continue
            shown, self._told = now, ""
            log.info(events.CERTIFICATE_LOADED, path=str(files[0]))

    async def _guarded(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and str(scope["path"]).startswith(_PRIVATE):
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_MISSING)).encode())]
            await send({"type": "http.response.start", "status": 404, "headers": headers})
            await send({"type": "http.response.body", "body": _MISSING})
            return
        await self._app(scope, receive, send)


@contextlib.contextmanager
def _bound(host: str, port: int, backlog: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(backlog)
        made.setblocking(False)
        yield made


def _stamps(*files: Path) -> tuple[tuple[int, int] | None, ...]:
    def stamp(path: Path) -> tuple[int, int] | None:
        try:
            info = path.stat()
        except OSError:
            return None
        return info.st_mtime_ns, info.st_ino

    return tuple(stamp(path) for path in files)
