"""The agent's way to control, which also writes down when control last answered, so that `status` can tell without asking control."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Final

from atoll.agent.transport import HttpTransport
from atoll.base.secret import Secret
from atoll.wire.agent import Poll, PollAnswer

_WRITE_EVERY_S: Final = 2.0


class HeardTransport(HttpTransport):
    """`HttpTransport`, heard."""

    def __init__(self, url: str, credential: Secret, health_file: Path, version: str) -> None:
        super().__init__(url, credential)
        self._health_file = health_file
        self._version = version
        self._written_at = 0.0
        self._problem = ""

    async def poll(self, message: Poll) -> PollAnswer:
        answer = await super().poll(message)
        failed = [check.id for check in message.health.checks if not check.ok and check.fatal]
        self._write(f"failed checks: {', '.join(failed)}" if failed else "")
        return answer

    def _write(self, problem: str) -> None:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if problem == self._problem and now - self._written_at < _WRITE_EVERY_S:
            return
        self._written_at, self._problem = now, problem
        record = {"pid": os.getpid(), "boot_s": now, "version": self._version, "problem": problem}
        temporary = self._health_file.with_suffix(".new")
        try:
            temporary.write_text(json.dumps(record) + "\n")
            temporary.replace(self._health_file)
        except OSError:
            # A full disk must not cost the agent its session; `status` will say that it hears nothing.
            self._written_at = 0.0
