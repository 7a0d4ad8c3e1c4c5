"""Our objects as E2B's: exact keys, and no null where a client's parser wants the key absent."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Final

from atoll.control.api.moment import timestamp
from atoll.control.service import EventRecord, UsagePoint
from atoll.domain.sandbox import Sandbox, State
from atoll.domain.spec import NetworkSpec, OnEnd, SaveMode, Spec
from atoll.domain.template import Template
from atoll.domain.tenancy import Client
from atoll.wire.guest import ENVD_VERSION

Json = dict[str, object]

RUNNING: Final = frozenset({State.READY, State.RESUMING})
PAUSED: Final = frozenset({State.PAUSING, State.PAUSED, State.SUSPENDING, State.SUSPENDED, State.STOPPING, State.STOPPED})
_SAVED: Final = frozenset({State.SUSPENDING, State.SUSPENDED, State.STOPPING, State.STOPPED})
STATES: Final[Mapping[str, frozenset[State]]] = {"running": RUNNING, "paused": PAUSED}
"""E2B's two states in ours. What is in neither does not exist for its clients."""

_KEY_PREFIX: Final = "e2b_"
_KEY_LENGTH: Final = 40
_KEY_NAMESPACE: Final = uuid.UUID("7c6f1f0e-5d0b-4c55-9d62-8a6c3b1f2e90")
_NEVER: Final = "9999-12-31T00:00:00Z"


def sandbox_created(sandbox: Sandbox, *, client_id: str, domain: str, access: str | None, traffic: str | None) -> Json:
    """E2B's `Sandbox`: what create and connect give."""
    answer: Json = {
        "templateID": sandbox.spec.template_id,
        "sandboxID": sandbox.id,
        "clientID": client_id,
        "envdVersion": ENVD_VERSION,
        "domain": domain,
    }
    if sandbox.alias is not None:
        answer["alias"] = sandbox.alias
    if access is not None:
        answer["envdAccessToken"] = access
    if traffic is not None:
        answer["trafficAccessToken"] = traffic
    return answer


def sandbox_listed(sandbox: Sandbox, *, client_id: str) -> Json:
    """E2B's `ListedSandbox`."""
    started = sandbox.started_at if sandbox.started_at is not None else sandbox.created_at
    answer: Json = {
        "templateID": sandbox.spec.template_id,
        "sandboxID": sandbox.id,
        "clientID": client_id,
        "startedAt": timestamp(started),
        "endAt": _NEVER if sandbox.end_at is None else timestamp(sandbox.end_at),
        "cpuCount": cpu_count(sandbox.spec.cpu_millis),
        "memoryMB": sandbox.spec.memory_mib,
        "diskSizeMB": sandbox.spec.disk_mib,
        "metadata": dict(sandbox.metadata),
        "state": "running" if sandbox.state in RUNNING else "paused",
        "envdVersion": ENVD_VERSION,
    }
    if sandbox.alias is not None:
        answer["alias"] = sandbox.alias
    if sandbox.unresponsive and sandbox.state in PAUSED:
        answer["envdUnresponsiveAtPause"] = True
    return answer


def sandbox_detail(sandbox: Sandbox, *, client_id: str, domain: str, access: str | None) -> Json:
    """E2B's `SandboxDetail`."""
    answer = sandbox_listed(sandbox, client_id=client_id)
    answer["domain"] = domain
    answer["allowInternetAccess"] = sandbox.spec.network.internet
    answer["network"] = network(sandbox.spec.network)
    answer["lifecycle"] = {"autoResume": sandbox.spec.auto_resume, "onTimeout": on_timeout(sandbox.spec)}
    if sandbox.state in PAUSED:
        # Frozen where it is, it has its memory, too.
        answer["pauseMode"] = (sandbox.save_mode or SaveMode.FULL).value if sandbox.state in _SAVED else SaveMode.FULL.value
    if access is not None:
        answer["envdAccessToken"] = access
    return answer


def network(spec: NetworkSpec) -> Json:
    """E2B's `SandboxNetworkConfig`; lists and the mask only where they were set."""
    answer: Json = {"allowPublicTraffic": spec.public_traffic}
    if spec.allow_out:
        answer["allowOut"] = list(spec.allow_out)
    if spec.deny_out:
        answer["denyOut"] = list(spec.deny_out)
    if spec.mask_request_host is not None:
        answer["maskRequestHost"] = spec.mask_request_host
    return answer


def on_timeout(spec: Spec) -> str:
    """What happens at the end, in E2B's words."""
    return "kill" if spec.on_end is OnEnd.KILL else "pause"


def cpu_count(cpu_millis: int) -> int:
    """Whole cores, rounded up: E2B knows no parts of one. *Units*: millicores."""
    return max(1, math.ceil(cpu_millis / 1000))


def template(one: Template, *, builds: int = 1, status: str = "ready") -> Json:
    """E2B's `Template`. `status`: of its newest build; what was not built from steps has one that is ready."""
    return {
        "templateID": one.id,
        "buildID": one.build_id,
        "cpuCount": cpu_count(one.cpu_millis),
        "memoryMB": one.memory_mib,
        "diskSizeMB": one.disk_mib,
        "public": one.public,
        "aliases": list(one.aliases),
        "names": names(one),
        "createdAt": timestamp(one.created_at),
        "updatedAt": timestamp(one.updated_at),
        "createdBy": None,
        "lastSpawnedAt": None if one.last_spawned_at is None else timestamp(one.last_spawned_at),
        "spawnCount": one.spawn_count,
        "buildCount": builds,
        "envdVersion": ENVD_VERSION,
        "buildStatus": "ready" if one.image else status,
    }


def template_with_builds(one: Template, builds: Sequence[Json] = ()) -> Json:
    """E2B's `TemplateWithBuilds`."""
    shown = list(builds) or [
        {
            "buildID": one.build_id,
            "status": "ready",
            "createdAt": timestamp(one.updated_at),
            "updatedAt": timestamp(one.updated_at),
            "finishedAt": timestamp(one.updated_at),
            "cpuCount": cpu_count(one.cpu_millis),
            "memoryMB": one.memory_mib,
            "diskSizeMB": one.disk_mib,
            "envdVersion": ENVD_VERSION,
        }
    ]
    listed = template(one)
    kept = ("templateID", "public", "aliases", "names", "createdAt", "updatedAt", "lastSpawnedAt", "spawnCount")
    return {**{name: listed[name] for name in kept}, "builds": shown}


def names(one: Template) -> list[str]:
    """Under which names a template is found."""
    return list(dict.fromkeys((one.name, *one.aliases)))


def key_id(client: Client) -> str:
    """E2B wants a UUID; this one follows from our id, so that it is the same in every answer."""
    return str(uuid.uuid5(_KEY_NAMESPACE, client.id))


def api_key(client: Client) -> Json:
    """E2B's `TeamAPIKey`. Only a digest and the last characters are kept, so the mask shows no first ones."""
    return {
        "id": key_id(client),
        "name": client.name,
        "mask": {
            "prefix": _KEY_PREFIX,
            "valueLength": _KEY_LENGTH,
            "maskedValuePrefix": "",
            "maskedValueSuffix": client.key_hint,
        },
        "createdAt": timestamp(client.created_at),
        "createdBy": None,
        "lastUsed": None if client.last_used_at is None else timestamp(client.last_used_at),
    }


def metric(sandbox: Sandbox, point: UsagePoint) -> Json:
    """E2B's `SandboxMetric`. *Units*: bytes; percent of all its CPUs."""
    spec = sandbox.spec
    return {
        "timestamp": timestamp(point.at),
        "timestampUnix": int(point.at),
        "cpuCount": cpu_count(spec.cpu_millis),
        "cpuUsedPct": point.cpu_pct,
        "memUsed": point.memory_bytes,
        "memTotal": spec.memory_mib << 20,
        "memCache": point.cache_bytes,
        "diskUsed": point.disk_bytes,
        "diskTotal": spec.disk_mib << 20,
    }


def log_entry(at: float, message: str, level: str, fields: Mapping[str, str]) -> Json:
    """E2B's `SandboxLogEntry`."""
    return {"timestamp": timestamp(at), "message": message, "level": level, "fields": dict(fields)}


def event_fields(event: EventRecord) -> dict[str, str]:
    """What an event says beside its type, as strings."""
    fields = {"source": "event", "generation": str(event.generation), "state": event.state}
    if event.reason is not None:
        fields["reason"] = event.reason
    fields.update({name: str(value) for name, value in event.data.items() if value is not None and name not in fields})
    return fields
