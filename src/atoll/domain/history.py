"""Types of recorded events: what clients read as a sandbox's history. Append-only."""

from __future__ import annotations

from typing import Final

SANDBOX_ACCEPTED: Final = "sandbox.accepted"
SANDBOX_HOST_REFUSED: Final = "sandbox.host_refused"
SANDBOX_NO_ELIGIBLE_HOST: Final = "sandbox.no_eligible_host"
SANDBOX_PLACED: Final = "sandbox.placed"
SANDBOX_READY: Final = "sandbox.ready"
SANDBOX_RESTARTING: Final = "sandbox.restarting"
SANDBOX_REPLACED: Final = "sandbox.replaced"
SANDBOX_END_MOVED: Final = "sandbox.end_moved"
SANDBOX_RELEASING: Final = "sandbox.releasing"
SANDBOX_CLEANUP_PENDING: Final = "sandbox.cleanup_pending"
SANDBOX_RELEASED: Final = "sandbox.released"
SANDBOX_FAILED: Final = "sandbox.failed"
SANDBOX_UNREACHABLE: Final = "sandbox.unreachable"
SANDBOX_REACHABLE: Final = "sandbox.reachable"
SANDBOX_RESTORED: Final = "sandbox.restored"
PLACEMENT_ERROR: Final = "placement.error"
PLACEMENT_GONE: Final = "placement.gone"
SANDBOX_DEADLINE_MISSED: Final = "sandbox.deadline_missed"
SANDBOX_REPLACEMENT_BLOCKED: Final = "sandbox.replacement_blocked"
SANDBOX_REPLACEMENT_AUTHORIZED: Final = "sandbox.replacement_authorized"
