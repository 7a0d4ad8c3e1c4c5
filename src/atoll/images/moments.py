"""Moments in the artifact store: the program that sends and fetches them, and what of their manifests is read here.

Theory of operation. `native/internal/moments` cuts, compresses, checks and puts together; here it is told what, and what came of it is read.
A sending program is never in anybody's way: it has the lowest priority, one processor, and ends with its caller's patience. Of a manifest
control reads which packs it needs, after it has checked that the manifest is what its digest says.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import AtollError, Code, Refused, Unavailable

MOMENTS: Final = "moments/sha256"
PACKS: Final = "packs/sha256"
"""Kinds of keys in the artifact store."""
MANIFEST_BYTES_MAX: Final = 64 << 20
PACK_BYTES_MAX: Final = 16 << 20
TAIL_BYTES: Final = 2000
LINE_BYTES_MAX: Final = 1 << 20
_HEX: Final = re.compile(r"[0-9a-f]{64}")
_LOWEST: Final = 19
_PASSING: Final = frozenset({Code.MOMENT_UNAVAILABLE, Code.CONTROL_UNAVAILABLE, Code.INTERNAL, Code.MOMENT_INCOMPLETE})

Objects = Callable[[], Mapping[str, Any]]
"""Where the store is, as `atoll-io` is told: `{"control": {...}}` or `{"folder": ...}`. It may hold a credential, so it is read each time."""


@dataclass(frozen=True, slots=True)
class MomentCarrier:
    """`atoll-io moment`."""

    program: Path
    objects: Objects

    async def upload(self, wish: Mapping[str, Any]) -> dict[str, Any]:
        """Have a moment in the store (`moments.Upload`). *Errors*: Refused with its code; Unavailable MOMENT_UNAVAILABLE, INTERNAL."""
        return await self._run("upload", wish, quietly=True)

    async def describe(self, digest: str) -> dict[str, Any]:
        """What is to be known of a moment. *Errors*: as `upload`, Refused MOMENT_CORRUPT."""
        return await self._run("describe", {"moment": digest})

    async def fetch(self, digest: str, directory: Path, *, spare_bytes: int) -> dict[str, Any]:
        """Have its files in a new directory. *Errors*: as `describe`, Refused HOST_DISK_FULL."""
        return await self._run("fetch", {"moment": digest, "directory": str(directory), "spare_bytes": spare_bytes})

    async def _run(self, verb: str, wish: Mapping[str, Any], *, quietly: bool = False) -> dict[str, Any]:
        given = json.dumps({**wish, "objects": dict(await asyncio.to_thread(self.objects))}).encode()
        pipe = asyncio.subprocess.PIPE
        environment = {**os.environ, "GOMAXPROCS": "1"} if quietly else None
        # A session of its own, so that all of its threads can be told at once to let others go first.
        child = await asyncio.create_subprocess_exec(
            str(self.program),
            "moment",
            verb,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            limit=LINE_BYTES_MAX,
            env=environment,
            start_new_session=True,
        )
        try:
            if quietly:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PGRP, child.pid, _LOWEST)
            said, errors = await child.communicate(given)
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await asyncio.shield(child.wait())
        return _read(said, errors, child.returncode or 0)


def _read(said: bytes, errors: bytes, status: int) -> dict[str, Any]:
    lines = said.splitlines()
    line: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    match line.get("event"):
        case "done":
            return dict(line["moment"])
        case "failed":
            raise _failure(str(line.get("code", "")), str(line.get("message", ""))[:TAIL_BYTES])
        case _:
            pass
    text = errors[-TAIL_BYTES:].decode(errors="replace").strip()
    raise Unavailable(Code.INTERNAL, f"the moment program broke off with status {status}: {text}", retry_after_s=5.0)


def _failure(code: str, message: str) -> AtollError:
    known = Code(code) if code in set(Code) else Code.INTERNAL
    return Unavailable(known, message, retry_after_s=5.0) if known in _PASSING else Refused(known, message)


VERSIONS: Final = (1, 2)
"""Of manifests (adr/0043): what control reads of them is the same in both."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What control reads of a manifest. *Units*: bytes."""

    digest: str
    packs: Mapping[str, int]
    """Hex digest of each pack it needs, and how long that is."""


def read_manifest(digest: str, content: bytes) -> Manifest:
    """*Errors*: Refused MOMENT_CORRUPT when it is another than its digest says, or no manifest. Hosts check what they build from it themselves."""
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest:
        raise Refused(Code.MOMENT_CORRUPT, f"manifest {digest} is not what its name says")
    try:
        document = json.loads(content)
        if document["version"] not in VERSIONS:
            raise Refused(Code.MOMENT_CORRUPT, f"manifest {digest} is of another version")
        packs = {str(pack["sha256"]): int(pack["size"]) for pack in document["packs"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(Code.MOMENT_CORRUPT, f"manifest {digest} is none: {type(error).__name__}") from None
    if not all(_HEX.fullmatch(name) and 0 < size <= PACK_BYTES_MAX for name, size in packs.items()):
        raise Refused(Code.MOMENT_CORRUPT, f"manifest {digest} names packs that are none")
    return Manifest(digest, packs)
