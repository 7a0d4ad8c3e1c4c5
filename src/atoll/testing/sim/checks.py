"""Invariants: what must hold after every single commit and every effect on a machine.

Theory of operation. `Ledger` follows the rows that commits change, and so knows at every moment who holds what; the machines say what
really runs. Each promise is one function that raises `Violated`. What must hold in the end is in `verdict.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from atoll.domain import history
from atoll.domain import sandbox as sb
from atoll.domain import snapshot as sn
from atoll.domain.placement import HOLDING_MOVES, Holding
from atoll.domain.sandbox import TERMINAL
from atoll.domain.warmth import OWN_TEAM
from atoll.drivers.port import Power
from atoll.testing.sim.machine import SimMachine
from atoll.testing.sim.store import Change, Row


def _grants(change: Change) -> bool:
    """Whether a placement comes to hold something: after a restore hosts may account for more than the record has room for, and have it."""
    before, after = change.before, change.after
    return after is not None and after["holding"] != Holding.NONE and (before is None or before["holding"] == Holding.NONE)


def copy_of(host_id: str, snapshot_id: str) -> str:
    """By what a ledger has a host's copy of a snapshot."""
    return f"{host_id} {snapshot_id}"


def _key(change: Change) -> str:
    row = change.row
    return copy_of(row["host_id"], row["snapshot_id"]) if change.table == "copies" else str(row["id"])


_FIRST_REVISION: Final = 1
_DECIDED: Final = ("revision", "state", "generation", "placement_id", "host_id", "reason", "started_at")
"""Columns that only a decision changes; a request's name is forgotten, and times are moved by a step of the clock, without one."""
_VECTOR: Final = ("cpu_millis", "memory_mib", "disk_mib", "slots")


class Violated(AssertionError):
    """A promise is broken."""


def _in_one_commit(moves: Mapping[tuple[Any, Any], Any], ends: frozenset[Any], ending: Any) -> dict[Any, set[Any]]:
    """From each state, what one commit may lead to: one move, or an end that is begun and confirmed at once."""
    found: defaultdict[Any, set[Any]] = defaultdict(set)
    for (state, _), after in moves.items():
        found[state].add(after)
    for afters in found.values():
        if ending in afters:
            afters.update(ends)
    return found


_AFTER: Final = _in_one_commit(sb.MOVES, TERMINAL, sb.State.RELEASING)
_HOLDS_AFTER: Final = _in_one_commit(HOLDING_MOVES, frozenset({Holding.NONE}), Holding.CLEANUP_PENDING)
_BACK: Final = frozenset({(sb.State.PROVISIONING, sb.State.PENDING), (sb.State.READY, sb.State.PENDING)})
"""The ways back: another placement, and only with a new generation."""


@dataclass(slots=True)
class Ledger:
    """Who holds what, as the rows say."""

    sandboxes: dict[str, Row] = field(default_factory=dict)
    placements: dict[str, Row] = field(default_factory=dict)
    hosts: dict[str, Row] = field(default_factory=dict)
    snapshots: dict[str, Row] = field(default_factory=dict)
    copies: dict[str, Row] = field(default_factory=dict)
    """Of snapshots that hosts have fetched, by both ids (`copy_of`)."""
    events: int = 0
    """The newest event's number."""
    certified: set[str] = field(default_factory=set)
    """Placements of which a client has said that a next one may begin beside them."""
    left: set[str] = field(default_factory=set)
    """Placements of suspended sandboxes that rest in the artifact store: they hold disk until they are gone, and nothing else."""

    def taken_back(self, rows: Sequence[Change]) -> None:
        """The store is what it was some time ago."""
        self.sandboxes, self.placements, self.hosts, self.snapshots, self.copies, self.events = {}, {}, {}, {}, {}, 0
        # By what is on record now, their sandboxes are on them.
        self.left.clear()
        for change in rows:
            if change.table == "events":
                self.events = max(self.events, change.row["seq"])
            elif change.table in ("sandboxes", "placements", "hosts", "snapshots", "copies"):
                getattr(self, change.table)[_key(change)] = change.row

    def take(self, changes: Sequence[Change]) -> None:
        """One commit. *Errors*: Violated."""
        for change in changes:
            tables = {
                "sandboxes": self.sandboxes,
                "placements": self.placements,
                "hosts": self.hosts,
                "snapshots": self.snapshots,
                "copies": self.copies,
            }
            rows = tables.get(change.table)
            if rows is not None:
                if change.after is None:
                    rows.pop(_key(change), None)
                else:
                    rows[_key(change)] = change.after
        for change in changes:
            self._certified(change)
        # What a restore has lost comes back as it is, and by no move of its table.
        back = {c.row["sandbox_id"] for c in changes if c.table == "events" and c.row["type"] == history.SANDBOX_RESTORED}
        for change in changes:
            if change.after is not None and not (change.table == "sandboxes" and change.after["id"] in back):
                _CHECKS[change.table](self, change.before, change.after)
        if not back:
            # What a host names that was fetched before it was counted is there, room or not; only grants are held to what it has.
            self._sums({c.row["host_id"] for c in changes if c.table == "placements" and _grants(c)})

    def held_by(self, sandbox_id: str) -> list[str]:
        """The placements of a sandbox that hold something."""
        return [name for name, row in self.placements.items() if row["sandbox_id"] == sandbox_id and row["holding"] != Holding.NONE]

    def used(self, host_id: str) -> dict[str, int]:
        """What a host's placements and snapshots hold, summed."""
        mine = [row for row in self.placements.values() if row["host_id"] == host_id and row["holding"] != Holding.NONE]
        sums = {name: sum(int(row[f"held_{name}"]) for row in mine) for name in _VECTOR}
        kept = (int(row["held_disk_mib"]) for row in self.snapshots.values() if row["host_id"] == host_id)
        fetched = (int(row["disk_mib"]) for row in self.copies.values() if row["host_id"] == host_id)
        return {**sums, "disk_mib": sums["disk_mib"] + sum(kept) + sum(fetched)}

    def uncounted(self, host_id: str, has: Collection[str]) -> list[str]:
        """Of the snapshots that a machine has: those that were made elsewhere, and that count nowhere for its host."""
        strange = (name for name in has if name in self.snapshots and self.snapshots[name]["host_id"] != host_id)
        return [name for name in strange if copy_of(host_id, name) not in self.copies]

    def _certified(self, change: Change) -> None:
        before, after = change.before, change.after
        if change.table == "sandboxes" and before is not None and after is not None and after["unseen"] > before["unseen"]:
            (self.left if before["state"] == sb.State.SUSPENDED else self.certified).add(before["placement_id"])

    def _snapshot(self, before: Row | None, after: Row) -> None:
        if before is None:
            if after["state"] != sn.State.TAKING:
                raise Violated(f"snapshot {after['id']} begins as {after['state']}")
            return
        if after == before:
            # A step of the clock moves what is left of it, without a decision.
            return
        was, now = sn.State(before["state"]), sn.State(after["state"])
        at_once = before["copy"] == sn.Copy.NONE and (was, now) == (sn.State.READY, sn.State.DELETED)
        if was is not now and not at_once and now not in [to for (state, _), to in sn.MOVES.items() if state is was]:
            raise Violated(f"snapshot {after['id']} went from {was} to {now}")
        if after["revision"] != before["revision"] + 1:
            raise Violated(f"snapshot {after['id']} went from revision {before['revision']} to {after['revision']}")
        if (after["held_disk_mib"] == 0) is not (now in sn.TERMINAL or after["copy"] == sn.Copy.NONE):
            raise Violated(f"snapshot {after['id']} is {now} and holds {after['held_disk_mib']} MiB")

    def _copy(self, before: Row | None, after: Row) -> None:
        if after["disk_mib"] <= 0 or (before is not None and after["disk_mib"] != before["disk_mib"]):
            raise Violated(f"the copy of {after['snapshot_id']} on {after['host_id']} holds {after['disk_mib']} MiB")
        if before is None and after["leaving"]:
            raise Violated(f"the copy of {after['snapshot_id']} on {after['host_id']} begins by leaving")

    def _sums(self, host_ids: set[str]) -> None:
        for host_id in sorted(host_ids):
            host = self.hosts[host_id]
            lacking = [f"{name} {used} of {host[name]}" for name, used in self.used(host_id).items() if used > host[name]]
            if lacking:
                raise Violated(f"host {host['name']} has granted more than it has: {', '.join(lacking)}")

    def _sandbox(self, before: Row | None, after: Row) -> None:
        name = f"sandbox {after['id']}"
        if after["claimable"] is not None and after["team_id"] != OWN_TEAM:
            raise Violated(f"{name} is of {after['team_id']}, and for anybody to take")
        if before is None:
            if after["revision"] != _FIRST_REVISION:
                raise Violated(f"{name} begins at revision {after['revision']}")
            return
        if after["claimable"] not in (None, before["claimable"]):
            raise Violated(f"{name} is for anybody to take again")
        if after["team_id"] != before["team_id"] and before["claimable"] is None:
            raise Violated(f"{name} is of {after['team_id']}, and was of {before['team_id']}, where nobody could take it")
        decided = any(before[column] != after[column] for column in _DECIDED)
        if after["revision"] != before["revision"] + decided:
            raise Violated(f"{name} went from revision {before['revision']} to {after['revision']}")
        was, now = sb.State(before["state"]), sb.State(after["state"])
        if after["generation"] < before["generation"]:
            raise Violated(f"{name} went back from generation {before['generation']} to {after['generation']}")
        if was != now and now not in _AFTER.get(was, set()):
            raise Violated(f"{name} went from {was} to {now}")
        if (was, now) in _BACK and after["generation"] != before["generation"] + 1:
            raise Violated(f"{name} went from {was} to {now} without a new generation")

    def _placement(self, before: Row | None, after: Row) -> None:
        name = f"placement {after['id']}"
        held = [one for one in self.held_by(after["sandbox_id"]) if one not in self.certified | self.left]
        if after["id"] in self.left and any(after[f"held_{name}"] for name in _VECTOR if name != "disk_mib"):
            raise Violated(f"{name} rests in the artifact store and holds more than its disk")
        if len(held) > 1:
            raise Violated(f"sandbox {after['sandbox_id']} holds {len(held)} placements: {', '.join(held)}")
        if before is None:
            if after["generation"] != self.sandboxes[after["sandbox_id"]]["generation"]:
                raise Violated(f"{name} is of a generation that its sandbox is not at")
            return
        if before["observed"] == "absent" and after["observed"] != "absent":
            raise Violated(f"{name} came back from a tombstone: {after['observed']}")
        if after["holding"] != before["holding"] and after["holding"] not in _HOLDS_AFTER.get(before["holding"], set()):
            raise Violated(f"{name} went from holding {before['holding']} to {after['holding']}")
        if after["desired_revision"] < before["desired_revision"]:
            raise Violated(f"{name} went back to desired revision {after['desired_revision']}")
        if before["desired"] == "ensure_absent" and after["desired"] != "ensure_absent":
            raise Violated(f"{name} is wanted again after it was ordered away")
        if after["seq"] < before["seq"] and after["seq"] != 0:
            raise Violated(f"{name} went back from observation {before['seq']} to {after['seq']}")

    def _host(self, before: Row | None, after: Row) -> None:
        if before is not None and after["credential_version"] < before["credential_version"]:
            raise Violated(f"host {after['name']} went back to credential version {after['credential_version']}")

    def _event(self, _before: Row | None, after: Row) -> None:
        if after["seq"] != self.events + 1:
            raise Violated(f"event {after['seq']} follows event {self.events}")
        self.events = after["seq"]


_CHECKS: Final = {
    "sandboxes": Ledger._sandbox,  # noqa: SLF001 - the table of its own checks
    "placements": Ledger._placement,  # noqa: SLF001
    "hosts": Ledger._host,  # noqa: SLF001
    "events": Ledger._event,  # noqa: SLF001
    "snapshots": Ledger._snapshot,  # noqa: SLF001
    "copies": Ledger._copy,  # noqa: SLF001
}


def machines_agree(ledger: Ledger, things: Mapping[str, SimMachine], *, fenced: Collection[str] = ()) -> None:
    """No sandbox runs twice, and what has ended runs nowhere. *Errors*: Violated.

    `fenced`: machines whose agents may not have heard of it. What had no lease any more and could not be saved stands still there.
    """
    running: dict[str, str] = {}
    for host, machine in things.items():
        for placement_id, thing in machine.placements.items():
            if thing.power is not Power.RUNNING and (thing.power is not Power.FROZEN or host in fenced):
                continue
            sandbox_id = thing.order.sandbox_id
            if placement_id in ledger.left:
                raise Violated(f"{placement_id} runs on {host} and its sandbox has left it")
            if placement_id in ledger.certified:
                continue
            if sandbox_id in running:
                raise Violated(f"sandbox {sandbox_id} runs twice: {running[sandbox_id]} and {placement_id}")
            running[sandbox_id] = placement_id
            row = ledger.sandboxes.get(sandbox_id)
            if row is not None and row["state"] in TERMINAL:
                raise Violated(f"sandbox {sandbox_id} is {row['state']} and runs on {host}")


def started(ledger: Ledger, things: SimMachine) -> None:
    """What runs on a machine is of its sandbox's present generation, and nobody has counted it as gone. *Errors*: Violated."""
    for placement_id in things.living():
        order = things.placements[placement_id].order
        row, placement = ledger.sandboxes.get(order.sandbox_id), ledger.placements.get(placement_id)
        if row is not None and order.generation < row["generation"] and placement_id not in ledger.certified:
            raise Violated(f"{placement_id} runs for generation {order.generation} of {order.sandbox_id}, which is at {row['generation']}")
        if placement is not None and placement["holding"] == Holding.NONE:
            raise Violated(f"{placement_id} runs and holds nothing")


def rests(ledger: Ledger, things: SimMachine) -> None:
    """What has given its CPU back does not run. *Errors*: Violated."""
    for placement_id in things.running():
        placement = ledger.placements.get(placement_id)
        if placement is not None and placement["holding"] in (Holding.PAUSED, Holding.SAVED, Holding.STOPPED):
            raise Violated(f"{placement_id} runs and holds what it does {placement['holding']}")


def believed(change: Change, things: SimMachine, *, fenced: bool) -> None:
    """What was just believed of a placement is so: absent is gone, ready was initialised. *Errors*: Violated."""
    before, after = change.before, change.after
    if before is None or after is None:
        return
    if after["observed"] == "absent" and before["observed"] != "absent" and not fenced and after["id"] in things.placements:
        raise Violated(f"{after['id']} was believed absent and is there")
    if after["ready"] and not before["ready"] and after["id"] in things.running() and after["id"] not in things.initialised:
        raise Violated(f"{after['id']} was believed ready and was never initialised")
