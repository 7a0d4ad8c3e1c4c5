"""The line to a machine's guest: what has to be said while no network may be used. Blocking.

How it is reached is its program's business (a serial bus, a vsock). The guest's end is `native/internal/guest/hostline`. One question, one answer, by lines of JSON; what an earlier host was answered and did not
read is passed over by its id.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.wire.guest import PlacementFile

ENTROPY_BYTES: Final = 64
Reach = Callable[[float], socket.socket]
"""`reach(timeout_s)`: a connection to the guest. *Errors*: OSError when nobody is there."""


def rest(reach: Reach, *, sync: bool, timeout_s: float) -> bool:
    """Have the guest halt its users' processes; whether it did. *Errors*: Refused SAVE_FAILED when it says that it cannot."""
    return _ask(reach, {"do": "rest", "sync": sync}, timeout_s=timeout_s, code=Code.SAVE_FAILED)


def wake(
    reach: Reach,
    *,
    timeout_s: float,
    code: Code = Code.RESUME_FAILED,
    placement: PlacementFile | None = None,
    cut: bool = False,
) -> bool:
    """Give the guest time and chance of its own, and let its users' processes go on. *Errors*: Refused when it says that it cannot.

    `placement`: whose it is now, for one that may be another's than it was. `cut`: nobody outside knows of its connections any more, and they end
    before anybody in it waits on one; a guest of an earlier release leaves them.
    """
    chance = base64.b64encode(os.urandom(ENTROPY_BYTES)).decode()
    question: dict[str, object] = {"do": "wake", "time_unix_ns": str(time.time_ns()), "entropy": chance}
    if placement is not None:
        question["placement"] = placement.model_dump()
    if cut:
        question["cut"] = True
    return _ask(reach, question, timeout_s=timeout_s, code=code)


def end(reach: Reach, *, timeout_s: float) -> bool:
    """Tell the guest to end its processes and itself; whether it heard. Never raises."""
    with contextlib.suppress(Refused):
        return _ask(reach, {"do": "end"}, timeout_s=timeout_s, code=Code.CLEANUP_FAILED)
    return False


def _ask(reach: Reach, question: dict[str, object], *, timeout_s: float, code: Code) -> bool:
    number = int.from_bytes(os.urandom(6), "big")
    deadline = time.monotonic() + timeout_s
    try:
        with reach(timeout_s) as peer:
            peer.sendall(json.dumps({"id": number, **question}).encode() + b"\n")
            answer = _answer_to(number, peer, deadline)
    except OSError:
        return False  # nobody there, or nobody who answers
    if answer is None:
        return False
    if not answer.get("ok"):
        raise Refused(code, f"the guest refuses to {question['do']}: {str(answer.get('error', ''))[:200]}")
    return True


def _answer_to(number: int, peer: socket.socket, deadline: float) -> dict[str, object] | None:
    """What guests say is not to be trusted: it is read within bounds of time and size, and only its shape counts."""
    kept = b""
    while len(kept) < 1 << 16 and (left := deadline - time.monotonic()) > 0:
        peer.settimeout(left)
        got = peer.recv(4096)
        if not got:
            return None
        *lines, kept = (kept + got).split(b"\n")
        for line in lines:
            try:
                answer = json.loads(line)
            except ValueError:
                continue
            if isinstance(answer, dict) and answer.get("id") == number:
                return answer
    return None
