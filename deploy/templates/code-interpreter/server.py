"""The server of the template `code-interpreter-v1`: E2B's code interpreter contract on port 49999, on Jupyter kernels.

Read `kernels.py` for what a context is, `messages.py` for the lines that are streamed. It listens only once the kernels of all languages
answer, so that a template's ready command finds them started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import uvicorn
from kernels import Context, Contexts, UnknownLanguage
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

PORT: Final = 49999
AHEAD: Final = ("python", "javascript", "bash")
"""Languages whose kernels are started ahead."""
KEEPALIVE_S: Final = 5.0
VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
GUEST: Final = os.environ.get("INTERPRETER_GUEST", "http://127.0.0.1:49983")
"""Where a sandbox's own variables are asked for."""


class Server:
    """The handlers."""

    def __init__(self, contexts: Contexts) -> None:
        self.contexts = contexts
        self.tasks: set[asyncio.Task[None]] = set()
        self.globals: tuple[str, dict[str, str]] = ("", {})

    async def health(self, _request: Request) -> Response:
        return PlainTextResponse("OK")

    async def execute(self, request: Request) -> Response:
        body = await request.json()
        code, context_id, language = body.get("code"), body.get("context_id"), body.get("language")
        if not isinstance(code, str):
            return PlainTextResponse("code is missing", 400)
        if context_id and language:
            return PlainTextResponse("only one of context_id and language may be given", 400)
        given = body.get("env_vars") or {}
        wrong = [name for name, value in given.items() if not VARIABLE.fullmatch(name) or not isinstance(value, str)]
        if wrong:
            return PlainTextResponse(f"{wrong[0][:80]!r} is no variable with a text", 400)
        try:
            context = self.contexts.known.get(context_id) if context_id else await self.contexts.default(language or "python")
        except UnknownLanguage as error:
            return PlainTextResponse(str(error), 400)
        if context is None:
            return PlainTextResponse(f"context {context_id[:80]} was not found", 404)
        env = {**await self._sandbox_env(request), **given}
        return StreamingResponse(self._stream(context, code, env), media_type="application/x-ndjson")

    async def _stream(self, context: Context, code: str, env: dict[str, str]) -> AsyncIterator[str]:
        lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        async def run() -> None:
            try:
                await context.execute(code, env, lines.put_nowait)
            except Exception as error:  # noqa: BLE001 - a task's boundary: it is told to the client
                lines.put_nowait({"type": "error", "name": type(error).__name__, "value": str(error), "traceback": ""})
            finally:
                lines.put_nowait({"type": "end_of_execution"})

        running = self._spawn(run())
        try:
            while True:
                try:
                    async with asyncio.timeout(KEEPALIVE_S):
                        line = await lines.get()
                except TimeoutError:
                    line = {"type": "keepalive"}
                yield json.dumps(line) + "\n"
                if line["type"] == "end_of_execution":
                    return
        finally:
            if not running.done():
                # The client has gone, by its own time limit for one. In a task of its own: this one is being cancelled.
                self._spawn(context.interrupt(running))

    async def _sandbox_env(self, request: Request) -> dict[str, str]:
        """What this sandbox was created with: known to its guest only, since the kernels may be older than it."""
        token = request.headers.get("x-access-token") or ""
        if token and self.globals[0] != token:

            def ask() -> dict[str, str]:
                asked = urllib.request.Request(f"{GUEST}/envs", headers={"X-Access-Token": token})  # noqa: S310 - the sandbox's own guest
                with urllib.request.urlopen(asked, timeout=2) as answer:  # noqa: S310
                    return {str(name): str(value) for name, value in json.load(answer).items() if VARIABLE.fullmatch(str(name))}

            with contextlib.suppress(OSError, ValueError):
                self.globals = (token, await asyncio.to_thread(ask))
        return self.globals[1] if token == self.globals[0] else {}

    async def make(self, request: Request) -> Response:
        body = json.loads(await request.body() or b"{}")
        try:
            made = await self.contexts.make(body.get("language") or "python", body.get("cwd"))
        except (UnknownLanguage, OSError) as error:
            return PlainTextResponse(str(error), 400)
        return JSONResponse(made.shown())

    async def listed(self, _request: Request) -> Response:
        return JSONResponse([one.shown() for one in self.contexts.known.values()])

    async def restart(self, request: Request) -> Response:
        found = self.contexts.known.get(request.path_params["id"])
        if found is None:
            return PlainTextResponse(f"context {request.path_params['id'][:80]} was not found", 404)
        await found.restart()
        return Response(status_code=204)

    async def remove(self, request: Request) -> Response:
        found = self.contexts.known.pop(request.path_params["id"], None)
        if found is None:
            return PlainTextResponse(f"context {request.path_params['id'][:80]} was not found", 404)
        await found.end()
        return Response(status_code=204)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


def application(home: str) -> Starlette:
    """The server, for sandboxes whose user's directory is `home`."""
    server = Server(Contexts(home))

    @contextlib.asynccontextmanager
    async def life(_app: Starlette) -> AsyncIterator[None]:
        await asyncio.gather(*(server.contexts.make(one, None) for one in AHEAD))
        server.contexts.defaults = {one.language: one.id for one in server.contexts.known.values()}
        yield
        await server.contexts.end()

    routes = [
        Route("/health", server.health),
        Route("/execute", server.execute, methods=["POST"]),
        Route("/contexts", server.make, methods=["POST"]),
        Route("/contexts", server.listed, methods=["GET"]),
        Route("/contexts/{id}", server.remove, methods=["DELETE"]),
        Route("/contexts/{id}/restart", server.restart, methods=["POST"]),
    ]
    return Starlette(routes=routes, lifespan=life)


if __name__ == "__main__":
    port = int(os.environ.get("INTERPRETER_PORT", PORT))
    uvicorn.run(application(str(Path.home())), host="0.0.0.0", port=port, log_level="warning")
