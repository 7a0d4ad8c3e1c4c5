"""A sentry's control socket: what `runsc` says there, said without starting a program for it.

A message is one JSON object each way, with no frame around it; descriptors come with its first byte. What answers is gVisor's, and a guest may
have got the better of it: its answer is bounded, and says no more than whether it has done what it was told.
Source: gVisor pkg/urpc, runsc/boot/controller.go, as of the pin in native/runsc/go.mod.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import Code, Refused
from atoll.drivers.sockets import connect

CHECKPOINT: Final = "containerManager.Checkpoint"
IMAGE_FILES: Final = ("checkpoint.img", "pages_meta.img", "pages.img")
"""What a checkpoint is, in the order in which a sentry wants them."""
ANSWER_BYTES_MAX: Final = 64 * 1024


def checkpoint(control: Path, target: Path, *, timeout_s: float) -> None:
    """Have the sentry write what it is into a directory, and go on; as `runsc checkpoint --leave-running`. Blocking.

    *Errors*: Refused SAVE_FAILED; OSError when the files cannot be made. A sentry that was told, and does not answer, may still be at it.
    """
    with contextlib.ExitStack() as files:
        fds = []
        for name in IMAGE_FILES:
            fds.append(os.open(target / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
            files.callback(os.close, fds[-1])
        wish = {"metadata": {"compression": "none"}, "have_pages_file": True, "Resume": True}
        call(control, CHECKPOINT, wish, fds=fds, timeout_s=timeout_s, code=Code.SAVE_FAILED)


def call(control: Path, method: str, argument: Mapping[str, Any], *, fds: Sequence[int] = (), timeout_s: float, code: Code) -> None:
    """Say one thing, and wait until it is done. Blocking. *Errors*: Refused with this code."""
    message = json.dumps({"method": method, "arg": argument}).encode()
    try:
        with connect(control.parent, control.name, timeout_s=timeout_s) as line:
            # Far less than a socket's buffer: it goes in one piece.
            socket.send_fds(line, [message], list(fds))
            answer = _answer(line, time.monotonic() + timeout_s)
    except TimeoutError as error:
        raise Refused(code, f"the sentry has not done {method} within {timeout_s:g} s") from error
    except (OSError, ValueError) as error:
        raise Refused(code, f"the sentry does not answer to {method}: {error}") from error
    if answer.get("success") is not True:
        raise Refused(code, f"the sentry has not done {method}: {str(answer.get('err'))[-600:]}")


def _answer(line: socket.socket, until: float) -> dict[str, Any]:
    """*Errors*: TimeoutError; OSError and ValueError for what is no answer."""
    said = b""
    while len(said) <= ANSWER_BYTES_MAX:
        line.settimeout(max(0.001, until - time.monotonic()))
        part = line.recv(4096)
        said += part
        with contextlib.suppress(json.JSONDecodeError):
            answer = json.loads(said)
            if not isinstance(answer, dict):
                break
            return answer
        if not part:
            raise ConnectionResetError("it has ended")
    raise ValueError("what it says is no answer")
