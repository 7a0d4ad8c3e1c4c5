"""Rows to aggregates and back; the only place that knows both shapes."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final

from pydantic import TypeAdapter

from atoll.base.ids import ClientId, EpochId, HostId, PlacementId, SandboxId, TeamId, TemplateId
from atoll.base.units import Vector
from atoll.domain import inventory
from atoll.domain.command import Kind
from atoll.domain.host import Admin, Host
from atoll.domain.moment import Moment
from atoll.domain.placement import Holding, Observed, Placement, held
from atoll.domain.sandbox import Condition, Sandbox, State
from atoll.domain.spec import LOCAL_S, SaveMode, Spec
from atoll.domain.template import Template
from atoll.domain.tenancy import Client, Role, Team
from atoll.store.prepared import Row

Values = dict[str, Any]

SPEC: Final = TypeAdapter(Spec)


@functools.lru_cache(maxsize=256)
def _spec_of(text: str) -> Spec:
    # Most sandboxes have one of a few specs, letter by letter, and each is read a dozen times in a sandbox's life.
    return SPEC.validate_json(text)


def spec(stored: object) -> Spec:
    """A spec from what its column holds: JSON, or what was read from it."""
    return _spec_of(stored) if isinstance(stored, str) else SPEC.validate_python(stored)


@functools.lru_cache(maxsize=256)
def spec_values(value: Spec) -> Values:
    """A spec as its column holds it, and as commands do; not to be changed."""
    values: Values = SPEC.dump_python(value, mode="json")
    if not value.manifest:
        # As before there were any: the digest of a command that an agent has in its journal stays what it was.
        del values["manifest"]
    if value.local_s == LOCAL_S:
        del values["local_s"]
    if value.origin is None:
        del values["origin"]
    else:
        values["origin"] = {name: said for name, said in values["origin"].items() if said or name in ("snapshot_id", "mode")}
    return values


def sandbox(row: Row) -> Sandbox:
    """A sandbox from its row."""
    return Sandbox(
        id=SandboxId(row["id"]),
        revision=row["revision"],
        team_id=TeamId(row["team_id"]),
        client_id=ClientId(row["client_id"]),
        state=State(row["state"]),
        spec=spec(row["spec"]),
        generation=row["generation"],
        created_at=row["created_at"],
        end_at=row["end_at"],
        end_revision=row["end_revision"],
        request_id=row["request_id"],
        request_digest=row["request_digest"],
        alias=row["alias"],
        metadata=row["metadata"],
        payload_digest=row["payload_digest"],
        started_at=row["started_at"],
        released_at=row["released_at"],
        host_id=HostId(row["host_id"]) if row["host_id"] else None,
        placement_id=PlacementId(row["placement_id"]) if row["placement_id"] else None,
        reason=row["reason"],
        detail=row["detail"],
        release_requested_at=row["release_requested_at"],
        failing=row["failing"],
        conditions=frozenset(Condition(c) for c in row["conditions"]),
        deadline_at=row["deadline_at"],
        tried_hosts=tuple(row["tried_hosts"]),
        attempts=row["attempts"],
        bootstrap_exposed=row["bootstrap_exposed"],
        secured=row["secured"],
        waiting_since=row["waiting_since"],
        unseen=row["unseen"],
        rested=State(row["rested"]) if row["rested"] else None,
        life_s=row["life_s"],
        save_mode=SaveMode(row["save_mode"]) if row["save_mode"] else None,
        unresponsive=row["unresponsive"],
        moment=moment(row),
        saved_on=HostId(row["saved_on"]) if row["saved_on"] else None,
        claimable=row["claimable"],
    )


def moment(row: Row) -> Moment | None:
    """A moment in the artifact store, from the three columns that name it."""
    return Moment(row["moment"], row["moment_bytes"], row["moment_kind"]) if row["moment"] is not None else None


def moment_values(value: Moment | None) -> Values:
    """Its three columns."""
    if value is None:
        return {"moment": None, "moment_bytes": 0, "moment_kind": ""}
    return {"moment": value.digest, "moment_bytes": value.size, "moment_kind": value.kind}


def sandbox_values(value: Sandbox) -> Values:
    """All columns but id, which never changes, spec, which a claim alone does, and revision, which the commit raises."""
    values: Values = {}
    for name, said in zip(_SANDBOX_FIELDS, _SANDBOX_READ(value), strict=True):
        values.update(_sandbox_columns(name, said))
    return values


def sandbox_changes(before: Sandbox, after: Sandbox) -> Values:
    """Of those columns the ones that differ."""
    values: Values = {}
    for name, old, new in zip(_SANDBOX_FIELDS, _SANDBOX_READ(before), _SANDBOX_READ(after), strict=True):
        # Most fields are the same object: a record is copied with changes.
        if old is not new and old != new:
            values.update(_sandbox_columns(name, new))
    return values


def _sandbox_columns(name: str, said: Any) -> Values:
    if name == "moment":
        return moment_values(said)
    write = _SANDBOX_WRITERS.get(name)
    return {name: said if write is None else write(said)}


def _value(said: Enum | None) -> Any:
    return said.value if said is not None else None


def _cut(said: str | None) -> str | None:
    return said[:2000] if said else said


_SANDBOX_FIELDS: Final = tuple(one.name for one in dataclasses.fields(Sandbox) if one.name not in ("id", "spec", "revision"))
_SANDBOX_READ: Final = operator.attrgetter(*_SANDBOX_FIELDS)
_SANDBOX_WRITERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "state": _value,
    "metadata": dict,
    "detail": _cut,
    "conditions": sorted,
    "tried_hosts": list,
    "rested": _value,
    "save_mode": _value,
}


def placement(row: Row) -> Placement:
    """A placement from its row."""
    return Placement(
        id=PlacementId(row["id"]),
        sandbox_id=SandboxId(row["sandbox_id"]),
        host_id=HostId(row["host_id"]),
        generation=row["generation"],
        holding=Holding(row["holding"]),
        vector=Vector(row["cpu_millis"], row["memory_mib"], row["disk_mib"], row["slots"]),
        nonce=row["nonce"],
        moment=row["moment"],
        origin_moment=row["origin_moment"],
        desired=Kind(row["desired"]),
        desired_revision=row["desired_revision"],
        desired_reason=row["desired_reason"],
        observed=Observed(row["observed"]),
        seq=row["seq"],
        applied_revision=row["applied_revision"],
        address=row["address"],
        reason=row["reason"],
        detail=row["detail"],
        ready=row["ready"],
        created_at=row["created_at"],
        gone_at=row["gone_at"],
    )


def placement_values(value: Placement) -> Values:
    """All columns that can change; `held_*` follow from the holding, so that a host's use is one SQL sum."""
    now_held = held(value)
    return {
        "holding": value.holding.value,
        "held_cpu_millis": now_held.cpu_millis,
        "held_memory_mib": now_held.memory_mib,
        "held_disk_mib": now_held.disk_mib,
        "held_slots": now_held.slots,
        "desired": value.desired.value,
        "desired_revision": value.desired_revision,
        "desired_reason": value.desired_reason,
        "observed": value.observed.value,
        "seq": value.seq,
        "applied_revision": value.applied_revision,
        "address": value.address,
        "reason": value.reason,
        "detail": value.detail,
        "ready": value.ready,
        "gone_at": value.gone_at,
    }


def new_placement_values(value: Placement) -> Values:
    """All columns of a placement that has no row yet."""
    return {
        "id": value.id,
        "sandbox_id": value.sandbox_id,
        "host_id": value.host_id,
        "generation": value.generation,
        "cpu_millis": value.vector.cpu_millis,
        "memory_mib": value.vector.memory_mib,
        "disk_mib": value.vector.disk_mib,
        "slots": value.vector.slots,
        "nonce": value.nonce,
        "moment": value.moment,
        "origin_moment": value.origin_moment,
        "created_at": value.created_at,
        **placement_values(value),
    }


def host(row: Row) -> Host:
    """A host from its row."""
    return Host(
        id=HostId(row["id"]),
        revision=row["revision"],
        name=row["name"],
        admin=Admin(row["admin"]),
        capacity=Vector(row["cpu_millis"], row["memory_mib"], row["disk_mib"], row["slots"]),
        arch=row["arch"],
        region=row["region"],
        labels=row["labels"],
        credential_digest=row["credential_digest"],
        credential_version=row["credential_version"],
        epoch=EpochId(row["epoch"]) if row["epoch"] else None,
        poll_seq=row["poll_seq"],
        seen_at=row["seen_at"],
        lease_until=row["lease_until"],
        agent_version=row["agent_version"],
        protocol_min=row["protocol_min"],
        protocol_max=row["protocol_max"],
        isolations=frozenset(row["isolations"]),
        moments=frozenset(row["moments"]),
        images=frozenset(row["images"]),
        problems=tuple(row["problems"]),
        facts=row["facts"],
        registered=inventory.from_json(row["registered"]),
    )


def host_values(value: Host) -> Values:
    """All columns but id, revision and created_at."""
    return {
        "name": value.name,
        "admin": value.admin.value,
        "cpu_millis": value.capacity.cpu_millis,
        "memory_mib": value.capacity.memory_mib,
        "disk_mib": value.capacity.disk_mib,
        "slots": value.capacity.slots,
        "arch": value.arch,
        "region": value.region,
        "labels": dict(value.labels),
        "credential_digest": value.credential_digest,
        "credential_version": value.credential_version,
        "epoch": value.epoch,
        "poll_seq": value.poll_seq,
        "seen_at": value.seen_at,
        "lease_until": value.lease_until,
        "agent_version": value.agent_version,
        "protocol_min": value.protocol_min,
        "protocol_max": value.protocol_max,
        "isolations": sorted(value.isolations),
        "moments": sorted(value.moments),
        "images": sorted(value.images),
        "problems": list(value.problems),
        "facts": dict(value.facts),
        "registered": inventory.to_json(value.registered),
    }


def team(row: Row) -> Team:
    """A team from its row."""
    return Team(TeamId(row["id"]), row["name"])


def client(row: Row) -> Client:
    """A client from its row."""
    return Client(
        id=ClientId(row["id"]),
        team_id=TeamId(row["team_id"]),
        name=row["name"],
        role=Role(row["role"]),
        key_digest=row["key_digest"],
        key_hint=row["key_hint"],
        created_at=row["created_at"],
        revoked_at=row["revoked_at"],
    )


def template(row: Row) -> Template:
    """A template from its row."""
    return Template(
        id=TemplateId(row["id"]),
        team_id=TeamId(row["team_id"]) if row["team_id"] else None,
        name=row["name"],
        aliases=tuple(row["aliases"]),
        public=row["public"],
        build_id=row["build_id"],
        image=row["image"],
        cpu_millis=row["cpu_millis"],
        memory_mib=row["memory_mib"],
        disk_mib=row["disk_mib"],
        default_user=row["default_user"],
        default_workdir=row["default_workdir"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        spawn_count=row["spawn_count"],
        last_spawned_at=row["last_spawned_at"],
        env=tuple(sorted(row["env"].items())),
        command=tuple(row["command"]),
        source=row["source"],
        command_user=row["command_user"],
        ready_command=tuple(row["ready_command"]),
    )
