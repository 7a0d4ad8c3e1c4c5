"""The running agent's own word on what it holds: a socket for root, one JSON document for each connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

from atoll.agent.agent import Agent
from atoll.agent.report import of_records
from atoll.programs import root_socket

ASK_S: Final = 3.0
_ANSWER_MAX: Final = 16 << 20


def serving(path: Path, agent: Agent) -> AbstractAsyncContextManager[None]:
    """Answer while inside."""
    return root_socket.serving(path, lambda _reader, writer: _answer(writer, agent), check="agent.socket")


async def _answer(writer: asyncio.StreamWriter, agent: Agent) -> None:
    with contextlib.suppress(OSError):
        writer.write(json.dumps(_describe(agent)).encode())
        await writer.drain()
    writer.close()


def _describe(agent: Agent) -> dict[str, Any]:
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    lease = agent.deadlines.lease_until if agent.deadlines is not None else None
    held = of_records(agent.ledger or (), now_boot=now, lease_until=lease)
    return {"pid": os.getpid(), "epoch": agent.epoch, **held}


def ask(path: Path) -> dict[str, Any] | None:
    """What the running agent holds; None when none answers."""
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(ASK_S)
            line.connect(str(path))
            said = bytearray()
            while chunk := line.recv(65536):
                said += chunk
                if len(said) > _ANSWER_MAX:
                    return None
        value = json.loads(said)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
