"""`resolve(request)`: from what a client asks, within class and template, to the spec that is stored and used by every API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.domain.spec import Isolation, NetworkSpec, OnEnd, OnExit, OnLeaseExpiry, Spec
from atoll.domain.template import Template


@dataclass(frozen=True, slots=True)
class WorkloadClass:
    """The operator's policy for a kind of workload. *Units*: millicores, MiB, seconds."""

    name: str = "default"
    isolation: Isolation = Isolation.GVISOR
    cpu_millis_min: int = 50
    cpu_millis_max: int = 8000
    memory_mib_min: int = 32
    memory_mib_max: int = 16384
    disk_mib_min: int = 64
    disk_mib_max: int = 65536
    pids_max: int = 4096
    timeout_s_max: int = 24 * 3600
    on_lease_expiry: OnLeaseExpiry = OnLeaseExpiry.END
    on_exit: OnExit = OnExit.RELEASE
    guest_ready_s: float = 60.0
    no_capacity_s: float = 300.0
    create_patience_s: float = 50.0
    metadata_pairs_max: int = 64
    metadata_bytes_max: int = 16384
    env_pairs_max: int = 512
    env_bytes_max: int = 65536


CLASSES: Final[Mapping[str, WorkloadClass]] = {
    "default": WorkloadClass(),
    "shared-kernel": WorkloadClass(name="shared-kernel", isolation=Isolation.SHARED_KERNEL),
}


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """What a client asks for, in Atoll's words; every API makes one of these. None means: as class and template say."""

    template: str
    """Id, alias, `namespace/alias`, with an optional `:tag`."""
    timeout_s: int
    class_name: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    request_id: str | None = None
    """Idempotency key, per team."""
    cpu_millis: int | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    on_end: OnEnd = OnEnd.KILL
    network: NetworkSpec = field(default_factory=NetworkSpec)
    secured: bool = True
    """Whether the guest demands its access token."""
    require_host: str | None = None
    wait: bool = True
    """Answer when it is ready (True) or when it is accepted."""
    e2b_env: bool = False
    """Add E2B's own variables and files inside."""


def _within(name: str, value: int, low: int, high: int, unit: str) -> int:
    if not low <= value <= high:
        raise Refused(Code.CLASS_LIMIT, f"{name} {value} {unit} is outside {low}..{high} {unit}")
    return value


def _check_maps(request: CreateRequest, policy: WorkloadClass) -> None:
    for name, mapping, pairs_max, bytes_max in (
        ("metadata", request.metadata, policy.metadata_pairs_max, policy.metadata_bytes_max),
        ("environment", request.env, policy.env_pairs_max, policy.env_bytes_max),
    ):
        if len(mapping) > pairs_max:
            raise Refused(Code.CLASS_LIMIT, f"{name} has {len(mapping)} pairs, at most {pairs_max} are allowed")
        size = sum(len(k.encode()) + len(v.encode()) for k, v in mapping.items())
        if size > bytes_max:
            raise Refused(Code.CLASS_LIMIT, f"{name} has {size} bytes, at most {bytes_max} are allowed")
        for key, value in mapping.items():
            if "\0" in key or "\0" in value or (mapping is request.env and (not key or "=" in key)):
                raise Refused(Code.INVALID_REQUEST, f"{name} has a name or value that cannot be set: {key[:40]!r}")


def resolve(request: CreateRequest, *, template: Template, policy: WorkloadClass) -> Spec:
    """Class limits, then the template's build, then the request's overrides, in that order.

    *Errors*: Refused CLASS_LIMIT, INVALID_REQUEST.
    """
    if request.timeout_s <= 0:
        raise Refused(Code.INVALID_REQUEST, f"timeout {request.timeout_s} s must be positive")
    if request.timeout_s > policy.timeout_s_max:
        raise Refused(Code.CLASS_LIMIT, f"timeout {request.timeout_s} s is longer than {policy.timeout_s_max} s")
    _check_maps(request, policy)
    cpu = request.cpu_millis if request.cpu_millis is not None else template.cpu_millis
    memory = request.memory_mib if request.memory_mib is not None else template.memory_mib
    disk = request.disk_mib if request.disk_mib is not None else template.disk_mib
    return Spec(
        class_name=policy.name,
        template_id=template.id,
        image=template.image,
        image_name=template.name,
        isolation=policy.isolation,
        cpu_millis=_within("CPU", cpu, policy.cpu_millis_min, policy.cpu_millis_max, "millicores"),
        memory_mib=_within("memory", memory, policy.memory_mib_min, policy.memory_mib_max, "MiB"),
        disk_mib=_within("disk", disk, policy.disk_mib_min, policy.disk_mib_max, "MiB"),
        pids_max=policy.pids_max,
        timeout_s=request.timeout_s,
        on_end=request.on_end,
        on_exit=policy.on_exit,
        on_lease_expiry=policy.on_lease_expiry,
        default_user=template.default_user,
        default_workdir=template.default_workdir,
        network=request.network,
        require_host=request.require_host,
        guest_ready_s=policy.guest_ready_s,
        no_capacity_s=policy.no_capacity_s,
        create_patience_s=policy.create_patience_s,
    )
