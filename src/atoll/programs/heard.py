"""Writes down that control has just answered the agent, and what the agent found out about its host, for `status` and `doctor`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Final

from atoll.programs import notes
from atoll.wire.agent import HostHealth

_WRITE_EVERY_S: Final = 2.0


class Heard:
    """Called after each answered poll with what the agent said of its host."""

    def __init__(self, file: Path, version: str) -> None:
        self._file = file
        self._version = version
        self._written_at = float("-inf")
        self._problem = ""

    def __call__(self, health: HostHealth) -> None:
        failed = dict.fromkeys(check.id for check in health.checks if not check.ok and check.fatal)
        problem = f"failed checks: {', '.join(failed)}" if failed else ""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if problem == self._problem and now - self._written_at < _WRITE_EVERY_S:
            return
        self._written_at, self._problem = now, problem
        record = {
            "pid": os.getpid(),
            "boot_s": now,
            "version": self._version,
            "problem": problem,
            "isolations": health.isolations,
            "checks": [check.model_dump() for check in health.checks],
        }
        try:
            # Holds nothing secret, and `status` is for everybody.
            notes.write(self._file, json.dumps(record) + "\n")
        except OSError:
            # A full disk must not cost the agent its session; `status` will say that control does not answer.
            self._written_at = float("-inf")
