"""Report: what a host's agent holds, for people on that machine. Holds no secret.

A running agent is asked (`programs/agent_socket.py`); of one that does not run, its journal is read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from atoll.agent.journal import load_facts, load_records
from atoll.agent.ledger import LEASE_FACT
from atoll.agent.record import Record

Json = dict[str, Any]


def of_records(records: Iterable[Record], *, now_boot: float, lease_until: float | None) -> Json:
    """Placements and lease. *Units*: seconds from now; of a lease that has run out, less than nothing."""
    held = [record for record in records if not record.absent]
    return {
        "leaseLeftSeconds": None if lease_until is None else round(lease_until - now_boot, 1),
        "placements": [_placement(record, now_boot=now_boot) for record in sorted(held, key=lambda record: record.placement_id)],
    }


def _placement(record: Record, *, now_boot: float) -> Json:
    return {
        "id": record.placement_id,
        "sandboxId": record.sandbox_id,
        "generation": record.generation,
        "desired": record.desired.value,
        "observed": record.observed.value,
        "ready": record.ready,
        "address": record.address,
        "endsInSeconds": None if record.end is None else round(record.end.at_boot - now_boot, 1),
        "quarantined": record.quarantined,
        "reason": record.reason,
    }


def of_journal(path: Path, *, now_boot: float, boot_id: str) -> Json | None:
    """The same from the journal of an agent that does not run (the caller holds its lock); None when there is none, or it is damaged."""
    if not path.exists():
        return None
    try:
        connection = sqlite3.connect(path, timeout=1.0)
        try:
            records, facts = load_records(connection), load_facts(connection)
        finally:
            connection.close()
    except sqlite3.Error:
        return None
    return of_records(records, now_boot=now_boot, lease_until=_lease(facts, boot_id))


def _lease(facts: dict[str, str], boot_id: str) -> float | None:
    """Of this boot of the kernel; a lease of an earlier one means nothing on this clock."""
    boot, _, until = facts.get(LEASE_FACT, "").partition(" ")
    try:
        return float(until) if boot == boot_id else None
    except ValueError:
        return None
