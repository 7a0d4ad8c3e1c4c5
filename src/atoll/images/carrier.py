"""`atoll-io image`: the program that moves images' bytes, asked by control (pull) and by the host's driver (fetch, unpack).

Theory of operation. One run is one child process; it says its progress in JSON lines, the last of which is `done` or `failed` with a
stable code. Credentials go in by standard input, never by an argument. Whatever ends the wait ends the child, and what it had begun is
a temporary file or an `.unfinished-*` directory, which the next run removes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import Code, Refused, Unavailable

LINE_BYTES_MAX: Final = 4 << 20
TAIL_BYTES: Final = 2000

Told = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Carrier:
    """The program and the store that it keeps blobs in."""

    program: Path
    store: Path
    registries: Mapping[str, Any] = field(default_factory=dict)
    """What the operator has said of registries: it holds for each pull, whoever asks for it."""

    async def pull(self, source: str, *, options: Mapping[str, Any] | None = None, told: Told = lambda _line: None) -> dict[str, Any]:
        """Have an image's blobs in the store, each checked; answers its record.

        *Errors*: Refused IMAGE_UNAVAILABLE, IMAGE_ACCESS_DENIED, IMAGE_CORRUPT, IMAGE_REFUSED, HOST_DISK_FULL, INVALID_REQUEST;
        Unavailable INTERNAL when the program broke off. *Idempotency*: what is in the store is not fetched again.
        """
        return await self._run(
            ["pull", "--source", source, "--options", "-"], json.dumps({**(options or {}), **self.registries}).encode(), told
        )

    async def fetch(self, digest: str, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Have an image's manifest and configuration in this store, from an object store. `objects`: where that is, as `atoll-io` is told
        (docs/adr/0020). Its layers come when it is unpacked.

        *Errors* and *Idempotency*: as `pull`.
        """
        return await self._run(["fetch", "--documents", "--image", digest, "--options", "-"], _given(objects), lambda _line: None)

    async def unpack(
        self, digest: str, cache: Path, *, base: tuple[str, Path] | None = None, objects: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Have the image's root file system in the cache. `base`: digest and tree of the ready-made image that it stands on. `objects`: where
        layers that the store has not are fetched from, side by side, and unpacked as they come (docs/adr/0029); None: the store has all.

        *Errors*: as `pull`. *Idempotency*: what a run that was cut off has got of a layer is where the next one goes on.
        """
        more = [] if base is None else ["--base", base[0], "--base-tree", str(base[1])]
        more += [] if objects is None else ["--options", "-"]
        given = b"" if objects is None else _given(objects)
        return await self._run(["unpack", "--image", digest, "--cache", str(cache), *more], given, lambda _line: None)

    async def _run(self, arguments: Sequence[str], given: bytes, told: Told) -> dict[str, Any]:
        pipe = asyncio.subprocess.PIPE
        command = [str(self.program), "image", arguments[0], "--store", str(self.store), *arguments[1:]]
        child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, limit=LINE_BYTES_MAX)
        try:
            return await _listen(child, given, told)
        finally:
            if child.returncode is None:
                child.kill()
                with contextlib.suppress(ProcessLookupError):
                    await asyncio.shield(child.wait())


def _given(objects: Mapping[str, Any]) -> bytes:
    return json.dumps({"objects": dict(objects)}).encode()


async def _listen(child: asyncio.subprocess.Process, given: bytes, told: Told) -> dict[str, Any]:
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    errors = asyncio.create_task(child.stderr.read())
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            child.stdin.write(given)
            await child.stdin.drain()
        child.stdin.close()
        async for raw in child.stdout:
            line = json.loads(raw)
            match line.get("event"):
                case "done":
                    return dict(line["image"])
                case "failed":
                    raise _failure(str(line.get("code", "")), str(line.get("message", "")))
                case _:
                    told(line)
        said = (await errors)[-TAIL_BYTES:].decode(errors="replace").strip()
        raise Unavailable(Code.INTERNAL, f"the image program broke off with status {await child.wait()}: {said}", retry_after_s=5.0)
    finally:
        errors.cancel()


def _failure(code: str, message: str) -> Refused:
    known = {one.value for one in Code}
    return Refused(Code(code) if code in known else Code.INTERNAL, message[:TAIL_BYTES])
