"""Our objects on the wire: plain dictionaries with the keys of `models.py`; the tests hold them to the OpenAPI document."""

from __future__ import annotations

from atoll.base.units import Vector
from atoll.control.api import moment
from atoll.control.api.settings import ApiSettings
from atoll.control.operations import AlertRecord, AuditRecord
from atoll.control.service import Caller, CheckedConfig, ConfigView, EventRecord, HostView, ReplicaView, Service, UsagePoint, Why
from atoll.domain.deployment import ClientLimits, Rate, TeamLimits
from atoll.domain.inventory import Inventory, Registered, conditions
from atoll.domain.moment import Moment
from atoll.domain.sandbox import TERMINAL, Sandbox
from atoll.domain.spec import Isolation
from atoll.domain.template import Template
from atoll.domain.tenancy import Client
from atoll.planning.placing import Verdict

Json = dict[str, object]


def timestamp(at: float | None) -> str | None:
    """*Units*: wall seconds."""
    return None if at is None else moment.timestamp(at)


def sandbox(
    one: Sandbox,
    *,
    domain: str,
    access_token: str | None = None,
    traffic_token: str | None = None,
    used: UsagePoint | None = None,
    isolated_by: str | None = None,
) -> Json:
    spec = one.spec
    placed = one.placement_id is not None and one.host_id is not None
    return {
        "id": one.id,
        "revision": one.revision,
        "teamId": one.team_id,
        "generation": one.generation,
        "state": one.state.value,
        "reason": one.reason,
        "detail": one.detail,
        "conditions": sorted(condition.value for condition in one.conditions),
        "bootstrapExposed": one.bootstrap_exposed,
        "template": {"id": spec.template_id, "name": spec.image_name},
        "origin": {"snapshotId": spec.origin.snapshot_id, "mode": spec.origin.mode.value}
        if spec.origin is not None and not spec.origin.or_boot
        else None,
        "class": spec.class_name,
        "isolation": spec.isolation.value,
        "machine": machine(spec.isolation, isolated_by),
        "size": {"cpuMillis": spec.cpu_millis, "memoryMib": spec.memory_mib, "diskMib": spec.disk_mib},
        "network": {
            "internet": spec.network.internet,
            "allowOut": list(spec.network.allow_out),
            "denyOut": list(spec.network.deny_out),
            "publicTraffic": spec.network.public_traffic,
            "maskRequestHost": spec.network.mask_request_host,
        },
        "metadata": dict(one.metadata),
        "clientRequestId": one.request_id,
        "timeoutSeconds": spec.timeout_s,
        "onEnd": spec.on_end.value,
        "createdAt": timestamp(one.created_at),
        "startedAt": timestamp(one.started_at),
        "endAt": timestamp(one.end_at),
        "saveMode": one.save_mode.value if one.save_mode is not None else None,
        "stored": stored(one.moment),
        "releaseRequestedAt": timestamp(one.release_requested_at),
        "releasedAt": timestamp(one.released_at),
        "placement": {"id": one.placement_id, "hostId": one.host_id} if placed else None,
        "domain": domain,
        "accessToken": access_token,
        "trafficToken": traffic_token,
        "usage": usage(one, used) if used is not None else None,
    }


def stored(one: Moment | None) -> Json | None:
    """What the artifact store has."""
    return {"moment": one.digest, "bytes": one.size} if one is not None else None


def machine(isolation: Isolation, isolated_by: str | None) -> Json:
    """What a sandbox runs on, and what a suspend of it keeps, as far as it is known."""
    driver, _, saves = (isolated_by or "").partition(" ")
    hardware = {Isolation.VM: "virtualized", Isolation.VM_EMULATED: "emulated"}.get(isolation)
    return {"driver": driver or None, "hardware": hardware, "saves": saves or None}


def sandbox_with_access(one: Sandbox, *, service: Service, settings: ApiSettings) -> Json:
    """With the tokens of one that has not ended: for answers about a single sandbox."""
    if one.state in TERMINAL:
        return sandbox(one, domain=settings.domain)
    return sandbox(
        one,
        domain=settings.domain,
        isolated_by=service.isolated_by(one),
        access_token=service.access_token(one),
        traffic_token=service.traffic_token(one),
    )


def event(one: EventRecord) -> Json:
    return {
        "seq": one.seq,
        "id": one.id,
        "at": timestamp(one.at),
        "type": one.type,
        "sandboxId": one.sandbox_id or None,
        "teamId": one.team_id or None,
        "generation": one.generation,
        "state": one.state,
        "reason": one.reason,
        "data": dict(one.data),
        "hostId": one.host_id,
        "placementId": one.placement_id,
        "commandId": one.command_id,
        "requestId": one.request_id,
    }


def usage(sandbox: Sandbox, point: UsagePoint) -> Json:
    spec = sandbox.spec
    return {
        "at": timestamp(point.at),
        "cpuPercent": point.cpu_pct,
        "cpuMillis": spec.cpu_millis,
        "memoryBytes": point.memory_bytes,
        "cacheBytes": point.cache_bytes,
        "memoryMib": spec.memory_mib,
        "diskBytes": point.disk_bytes,
        "diskMib": spec.disk_mib,
    }


def alert(one: AlertRecord) -> Json:
    return {
        "id": one.id,
        "kind": one.kind.value,
        "severity": one.severity,
        "subject": one.subject,
        "detail": one.detail,
        "runbook": one.kind.runbook,
        "raisedAt": timestamp(one.raised_at),
        "seenAt": timestamp(one.seen_at),
        "clearedAt": timestamp(one.cleared_at),
    }


def audit_entry(one: AuditRecord) -> Json:
    return {
        "seq": one.seq,
        "at": timestamp(one.at),
        "action": one.action,
        "subject": one.subject,
        "result": one.result,
        "teamId": one.team_id,
        "clientId": one.client_id,
        "address": one.address,
        "requestId": one.request_id,
        "data": dict(one.data),
    }


def template(one: Template) -> Json:
    return {
        "id": one.id,
        "name": one.name,
        "aliases": list(one.aliases),
        "public": one.public,
        "buildId": one.build_id,
        "image": one.image,
        "size": {"cpuMillis": one.cpu_millis, "memoryMib": one.memory_mib, "diskMib": one.disk_mib},
        "defaultUser": one.default_user,
        "defaultWorkdir": one.default_workdir,
        "env": dict(one.env),
        "startCommand": list(one.command),
        "source": one.source,
        "createdAt": timestamp(one.created_at),
        "updatedAt": timestamp(one.updated_at),
        "spawnCount": one.spawn_count,
        "lastSpawnedAt": timestamp(one.last_spawned_at),
    }


def amount(vector: Vector) -> Json:
    return {"cpuMillis": vector.cpu_millis, "memoryMib": vector.memory_mib, "diskMib": vector.disk_mib, "slots": vector.slots}


def why(told: Why, *, limit: int) -> Json:
    spec, explanation, one = told.spec, told.explanation, told.sandbox
    verdicts = explanation.verdicts
    return {
        "sandboxId": one.id if one is not None else None,
        "state": one.state.value if one is not None else None,
        "placement": {"id": one.placement_id, "hostId": one.host_id} if one is not None and one.placement_id and one.host_id else None,
        "class": spec.class_name,
        "policy": spec.placement_policy.value,
        "need": amount(spec.vector()),
        "summary": str(explanation),
        "hosts": len(verdicts),
        "candidates": explanation.candidates,
        "removed": [{"filter": one.filter.value, "hosts": one.hosts, "alone": one.alone} for one in explanation.sums],
        "verdicts": [_verdict(one) for one in verdicts[:limit]] if told.shows_hosts else None,
    }


def _verdict(one: Verdict) -> Json:
    return {
        "hostId": one.advert.host.id,
        "name": one.advert.host.name,
        "rank": one.rank,
        "refused": one.refused,
        "hasImage": one.image,
        "free": amount(one.advert.free),
        "objections": [{"filter": each.filter.value, "detail": each.detail} for each in one.objections],
    }


def _inventory(one: Inventory) -> Json:
    return {"cpuCount": one.cpu_count, "memoryMib": one.memory_mib, "diskMib": one.disk_mib}


def _registered(one: Registered) -> Json:
    over = one.overcommit
    return {
        "inventory": _inventory(one.inventory),
        "reserve": amount(one.reserve),
        "overcommit": None if over is None else {"cpu": over.cpu, "memory": over.memory, "disk": over.disk},
        "slots": one.slots,
    }


def host(view: HostView) -> Json:
    one = view.host
    return {
        "id": one.id,
        "revision": one.revision,
        "name": one.name,
        "admin": one.admin.value,
        "health": view.health.value,
        "arch": one.arch,
        "region": one.region,
        "labels": dict(one.labels),
        "isolations": sorted(one.isolations),
        "goesOnFrom": sorted(one.moments),
        "capacity": amount(one.capacity),
        "used": amount(view.used),
        "sandboxes": view.sandboxes,
        "warm": view.warm,
        "problems": list(one.problems),
        "conditions": [
            {"id": name, "detail": detail}
            for name, detail in conditions(
                one.problems, registered=one.registered, reported=one.reported, skew_s=one.facts.get("clock_skew_s")
            )
        ],
        "registered": None if one.registered is None else _registered(one.registered),
        "reported": None if one.reported is None else _inventory(one.reported),
        "agentVersion": one.agent_version,
        "seenAt": timestamp(one.seen_at),
        "leaseUntil": timestamp(one.lease_until),
        "facts": dict(one.facts),
    }


def key(one: Client) -> Json:
    return {
        "id": one.id,
        "name": one.name,
        "role": one.role.value,
        "hint": one.key_hint,
        "createdAt": timestamp(one.created_at),
        "lastUsedAt": timestamp(one.last_used_at),
        "revokedAt": timestamp(one.revoked_at),
    }


def replica(one: ReplicaView) -> Json:
    return {
        "id": one.id,
        "address": one.address,
        "machine": one.machine,
        "version": one.version,
        "startedAt": timestamp(one.started_at),
        "seenAt": timestamp(one.seen_at),
        "healthy": one.healthy,
        "answering": one.answering,
    }


def whoami(caller: Caller, of_client: ClientLimits, of_team: TeamLimits) -> Json:
    team, client = caller.team, caller.client
    return {
        "team": {
            "id": team.id,
            "name": team.name,
            "limits": {"maxSandboxes": of_team.sandboxes, "maxRecords": of_team.records, "requestsPerSecond": _per_s(of_team.requests)},
        },
        "client": {
            "id": client.id,
            "name": client.name,
            "role": client.role.value,
            "limits": {"maxSandboxes": of_client.sandboxes, "requestsPerSecond": _per_s(of_client.requests)},
        },
    }


def _per_s(rate: Rate | None) -> float | None:
    return None if rate is None else rate.per_s


def config(view: ConfigView) -> Json:
    return {
        "revision": view.revision,
        "document": view.document,
        "appliedAt": timestamp(view.applied_at),
        "appliedBy": view.client_id,
    }


def checked_config(checked: CheckedConfig) -> Json:
    return {
        "valid": not checked.problems,
        "revision": checked.revision,
        "problems": [
            {"line": one.line or None, "column": one.column or None, "path": one.path, "message": one.message, "hint": one.hint}
            for one in checked.problems
        ],
        "changes": [{"path": one.path, "before": one.before, "after": one.after} for one in checked.changes],
    }
