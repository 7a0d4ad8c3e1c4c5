"""Command: what control asks of an agent about one placement.

The id is `{placement}:{generation}:{desired_revision}`, so that the same intent has the same id wherever it is computed; the digest
covers everything but epoch and lease. An agent that gets one id with two digests refuses (`COMMAND_CONFLICT`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """The state that a placement should be in. `ENSURE_RUNNING` implies present."""

    ENSURE_PRESENT = "ensure_present"
    ENSURE_RUNNING = "ensure_running"
    ENSURE_PAUSED = "ensure_paused"
    ENSURE_SUSPENDED = "ensure_suspended"
    ENSURE_STOPPED = "ensure_stopped"
    ENSURE_ABSENT = "ensure_absent"


def command_id(placement_id: str, generation: int, desired_revision: int) -> str:
    """The deterministic id of one desired state of one placement."""
    return f"{placement_id}:{generation}:{desired_revision}"


def digest(content: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over the canonical JSON of what the command says."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
