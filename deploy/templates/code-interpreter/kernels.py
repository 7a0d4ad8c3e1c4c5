"""Contexts: kernels that run one piece of code at a time.

Theory of operation. A context has one kernel and one lock. An execution holds the lock from when its variables are set until the kernel is
idle again, whoever listens: a client that goes away interrupts its execution, and the next one begins only afterwards. A kernel that dies is
told to the client as an error and started anew, under the same context id, with nothing of what it knew.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any, Final

import messages
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager

HERE: Final = Path(__file__).resolve().parent
READY_S: Final = 120.0
LOOK_S: Final = 1.0
"""How often it is looked whether a silent kernel is alive."""
INTERRUPT_S: Final = 5.0
"""After this long, a kernel that does not heed an interrupt is restarted."""
NAMES: Final[Mapping[str, str]] = {
    "python": "python",
    "python3": "python",
    "py": "python",
    "javascript": "javascript",
    "js": "javascript",
    "typescript": "typescript",
    "ts": "typescript",
    "bash": "bash",
    "sh": "bash",
}
_FORMATS: Final = f"import runpy; runpy.run_path({str(HERE / 'formats.py')!r})['load'](get_ipython()); del runpy"
_COMMANDS: Final[Mapping[str, list[str]]] = {
    "python": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", f"--IPKernelApp.exec_lines={_FORMATS}"],
    "javascript": ["deno", "jupyter", "--kernel", "--conn", "{connection_file}"],
    "typescript": ["deno", "jupyter", "--kernel", "--conn", "{connection_file}"],
    "bash": [sys.executable, "-m", "bash_kernel", "-f", "{connection_file}"],
}
_BY_MESSAGE: Final = frozenset({"javascript", "typescript"})
"""Languages whose kernel is interrupted by a message instead of a signal."""
_LATE: Final = _BY_MESSAGE
"""Languages whose kernel may say that it is idle before the last of its output: seen of Deno 2.9, most often at its first execution."""
LATE_S: Final = 0.1

Tell = Callable[[dict[str, Any]], None]


class UnknownLanguage(ValueError):
    """There is no kernel for it."""


class _Manager(AsyncKernelManager):  # type: ignore[misc]
    """A kernel whose command is ours, not that of a directory of kernels on the machine."""

    language: str = "python"

    @property
    def kernel_spec(self) -> KernelSpec:
        mode = "message" if self.language in _BY_MESSAGE else "signal"
        return KernelSpec(argv=_COMMANDS[self.language], language=self.language, display_name=self.language, interrupt_mode=mode)


@dataclass
class Context:
    """One kernel, with what its clients know of it."""

    id: str
    language: str
    cwd: str
    manager: Any
    client: Any
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    current: asyncio.Task[None] | None = None
    """Who holds the lock for an execution."""

    def shown(self) -> dict[str, str]:
        """As clients see it."""
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def execute(self, code: str, env: Mapping[str, str], tell: Tell) -> None:
        """Run code with these variables set meanwhile, and tell what comes of it."""
        async with self.lock:
            self.current = asyncio.current_task()
            try:
                if not await self.manager.is_alive():
                    await self.begin_anew()
                if env:
                    await self._follow(setting(self.language, env), lambda _line: None, silent=True)
                await self._follow(code, tell, silent=False)
                if env:
                    await self._follow(unsetting(self.language, env), lambda _line: None, silent=True)
            except KernelDied:
                tell(messages.error("KernelDied", "the kernel died and was started anew; what it knew is gone", ""))
                await self.begin_anew()
            finally:
                self.current = None

    async def interrupt(self, running: asyncio.Task[None]) -> None:
        """End what runs: by an interrupt, and by a new kernel where that is not heeded."""
        if self.current is not running:
            # Its turn has not come: what runs now is another client's.
            running.cancel()
            return
        await self.manager.interrupt_kernel()
        done, _ = await asyncio.wait([running], timeout=INTERRUPT_S)
        if not done:
            # The execution sees that its kernel is gone, and starts it anew.
            await self._kill()

    async def restart(self) -> None:
        """A new kernel in its place. What runs ends first."""
        await self._kill()
        async with self.lock:
            if not await self.manager.is_alive():
                await self.begin_anew()

    async def begin_anew(self) -> None:
        """Start the kernel again."""
        self.client.stop_channels()
        await self.manager.restart_kernel(now=True)
        await _reach(self)

    async def _kill(self) -> None:
        """End this kernel, not one that is started in its place meanwhile."""
        process = self.manager.provisioner.process
        process.kill()
        await asyncio.to_thread(process.wait)

    async def end(self) -> None:
        """No kernel any more."""
        self.client.stop_channels()
        await self.manager.shutdown_kernel(now=True)

    async def _follow(self, code: str, tell: Tell, *, silent: bool) -> None:
        wanted = self.client.execute(code, silent=silent, store_history=not silent, allow_stdin=False)
        idle = False
        while True:
            try:
                said = await self.client.get_iopub_msg(timeout=LATE_S if idle else LOOK_S)
            except Empty:
                if idle:
                    return
                if not await self.manager.is_alive():
                    raise KernelDied from None
                continue
            if said["parent_header"].get("msg_id") != wanted:
                continue
            if said["msg_type"] == "status" and said["content"]["execution_state"] == "idle":
                if silent or self.language not in _LATE:
                    return
                idle = True
            if (line := messages.line(said["msg_type"], said["content"])) is not None:
                tell(line)


class KernelDied(Exception):
    """It ended while it ran something."""


async def start(context: Context) -> None:
    """Start a context's kernel, and wait until it answers. *Errors*: RuntimeError."""
    environment = {**os.environ, "NO_COLOR": "1"} if context.language in _BY_MESSAGE else dict(os.environ)
    await context.manager.start_kernel(cwd=context.cwd, env=environment)
    await _reach(context)


async def _reach(context: Context) -> None:
    context.client = context.manager.client()
    context.client.start_channels()
    await context.client.wait_for_ready(timeout=READY_S)


@dataclass
class Contexts:
    """All contexts of this server; `defaults` are those of code that names none."""

    home: str
    known: dict[str, Context] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    making: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def make(self, language: str, cwd: str | None) -> Context:
        """A new context. *Errors*: UnknownLanguage; OSError when there is no such directory."""
        plain = NAMES.get(language.lower())
        if plain is None:
            raise UnknownLanguage(f"there is no kernel for {language[:40]!r}; there are: {', '.join(sorted(set(NAMES.values())))}")
        place = cwd or self.home
        if not await asyncio.to_thread(os.path.isdir, place):
            raise NotADirectoryError(f"{place!r} is no directory")
        manager = _Manager()
        manager.language = plain
        context = Context(str(uuid.uuid4()), plain, place, manager, None)
        await start(context)
        self.known[context.id] = context
        return context

    async def default(self, language: str) -> Context:
        """The context of code that names none; made when it is first wanted."""
        plain = NAMES.get(language.lower(), language)
        async with self.making:
            found = self.known.get(self.defaults.get(plain, ""))
            if found is None:
                found = await self.make(plain, None)
                self.defaults[plain] = found.id
            return found

    async def end(self) -> None:
        """End all kernels."""
        await asyncio.gather(*(one.end() for one in self.known.values()), return_exceptions=True)


def setting(language: str, env: Mapping[str, str]) -> str:
    """Code that sets variables, and remembers what they were."""
    match language:
        case "python":
            names = json.dumps(list(env))
            keep = f"__import__('builtins').__dict__['_kept_env'] = {{k: __import__('os').environ.get(k) for k in {names}}}"
            return f"{keep}\n__import__('os').environ.update({dict(env)!r})"
        case "bash":
            return "\n".join(f"_kept_{name}=${{{name}-}}; export {name}={shlex.quote(value)}" for name, value in env.items())
        case _:
            return (
                f"globalThis._keptEnv = {json.dumps(list(env))}.map((k) => [k, Deno.env.get(k)]);"
                f"for (const [k, v] of Object.entries({json.dumps(dict(env))})) Deno.env.set(k, v);"
            )


def unsetting(language: str, env: Mapping[str, str]) -> str:
    """Code that gives variables back what they were."""
    match language:
        case "python":
            kept = "__import__('builtins').__dict__.pop('_kept_env', {})"
            change = "__import__('os').environ.pop(k, None) if v is None else __import__('os').environ.__setitem__(k, v)"
            return f"[{change} for k, v in {kept}.items()]"
        case "bash":
            return "\n".join(
                f'if [ -n "$_kept_{name}" ]; then export {name}="$_kept_{name}"; else unset {name}; fi; unset _kept_{name}' for name in env
            )
        case _:
            return (
                "for (const [k, v] of globalThis._keptEnv ?? []) v === undefined ? Deno.env.delete(k) : Deno.env.set(k, v);"
                "delete globalThis._keptEnv;"
            )
