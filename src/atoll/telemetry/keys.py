"""Names of log fields, append-only: one word for one thing in every program's log. Units are in the name."""

from __future__ import annotations

from typing import Final

ALWAYS: Final = ("at", "level", "event", "process")
"""On every line: RFC 3339 time in UTC, level, event name (telemetry.events), program."""

KEYS: Final[frozenset[str]] = frozenset(
    {
        *ALWAYS,
        # which object
        "sandbox_id", "placement_id", "host_id", "team_id", "client_id", "template_id", "epoch", "generation", "revision", "command_id",
        "request_id", "install_id", "name", "pid", "path", "address", "url", "port", "home", "version", "slot", "image", "logger",
        "build_id", "snapshot_id", "digest", "key",
        # what happened
        "state", "was", "reason", "code", "detail", "hint", "kind", "status", "method", "attempt", "attempts", "restarts", "signal", "exit_code",
        "seq", "count", "check", "message", "exception", "error", "what", "operation",
        # how much
        "elapsed_ms", "delay_s", "remaining_s", "lease_s", "step_s", "size_bytes", "free_mib",
    }
)  # fmt: skip
"""The fields a line may have; a new one is added here with its unit."""
