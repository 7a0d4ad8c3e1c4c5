"""What has changed in a container's files, as a layer: the runtime says where it is, `atoll-io image pack` makes the layer of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

from atoll.base.errors import Code, Refused
from atoll.drivers.oci.runtime import Runtime
from atoll.drivers.port import Change

CAPTURE_S: Final = 600.0
TAIL_BYTES: Final = 600


def capture(runtime: Runtime, directory: Path, container_id: str, program: Path, target: Path) -> Change:
    """As Driver.capture; blocks. What a killed run left at the target goes."""
    target.unlink(missing_ok=True)
    try:
        return _read(runtime.capture(directory, container_id, [str(program), "image", "pack", "--target", str(target)]))
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def pack(command: Sequence[str], *, stdin: IO[bytes] | None = None) -> bytes:
    """Run the packing program; what it says. *Errors*: Refused RUNTIME_MISSING, START_FAILED."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL if stdin is None else stdin, capture_output=True, timeout=CAPTURE_S, check=False
        )
    except (FileNotFoundError, PermissionError) as error:
        raise Refused(Code.RUNTIME_MISSING, f"{command[0]} cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise Refused(Code.START_FAILED, f"the files were not packed within {CAPTURE_S:g} s") from error
    return done.stdout or done.stderr[-TAIL_BYTES:]


def out_of_memory() -> Refused:
    """Why there is no layer where the kernel has ended the runtime meanwhile: a sentry holds each file whole to hand it out.

    It would end so each time (gVisor, pkg/sentry/fsimpl/tmpfs/tar.go).
    """
    message = "a file that was written has no room in the sandbox's memory, which it needs to become part of a layer"
    return Refused(Code.IMAGE_REFUSED, f"{message}: build it with more memory than its largest file has")


def _read(said: bytes) -> Change:
    lines = said.splitlines()
    try:
        line: dict[str, Any] = json.loads(lines[-1])
        if line["event"] == "done":
            made = line["image"]
            return Change(str(made["digest"]), int(made["size"]), int(made["entries"]))
        code, message = str(line.get("code", "")), str(line.get("message", ""))
    except (IndexError, ValueError, KeyError, TypeError):
        raise Refused(Code.INTERNAL, f"the packing program broke off: {said[-TAIL_BYTES:].decode(errors='replace')}") from None
    raise Refused(Code.__members__.get(code, Code.INTERNAL), message[:2000])
