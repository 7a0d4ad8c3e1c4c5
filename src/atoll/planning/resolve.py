"""`resolve(request)`: from what a client asks, within class and template, to the spec that is stored and used by every API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.base.records import replace
from atoll.domain.deployment import Deployment, Range, WorkloadClass
from atoll.domain.spec import Ingress, NetworkSpec, OnEnd, SaveMode, Spec
from atoll.domain.template import Template

FALLBACK_TEMPLATE: Final = "base"
"""Where neither the request nor its class names one."""


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """What a client asks for, in Atoll's words; every API makes one of these. None means: as class and template say."""

    template: str | None = None
    """Id, alias, `namespace/alias`, with an optional `:tag`."""
    timeout_s: int | None = None
    class_name: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    request_id: str | None = None
    """Idempotency key, per team."""
    cpu_millis: int | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    on_end: OnEnd = OnEnd.KILL
    auto_resume: bool = False
    """Whether traffic for its ports resumes it."""
    end_mode: SaveMode = SaveMode.FULL
    """What is saved where it is suspended at its end."""
    network: NetworkSpec = field(default_factory=NetworkSpec)
    secured: bool = True
    """Whether the guest demands its access token."""
    require_host: str | None = None
    prefer_host: str | None = None
    wait: bool = True
    """Answer when it is ready (True) or when it is accepted."""
    e2b_env: bool = False
    """Add E2B's own variables and files inside."""


def class_of(request: CreateRequest, deployment: Deployment) -> WorkloadClass:
    """The class that a request is of. *Errors*: Refused INVALID_REQUEST when there is none of that name."""
    policy = deployment.classes.get(request.class_name or deployment.default_class)
    if policy is None:
        there = ", ".join(deployment.classes)
        raise Refused(Code.INVALID_REQUEST, f"class {(request.class_name or '')[:64]!r} does not exist; there are {there}")
    return policy


def template_of(request: CreateRequest, policy: WorkloadClass) -> str:
    """The reference of the template that a request uses. *Errors*: none: whether there is such a template is for others to say."""
    return request.template or policy.template or FALLBACK_TEMPLATE


def _within(name: str, asked: int | None, allowed: Range, of_template: int, unit: str) -> int:
    """What was asked for, else the class's default, else the template's own."""
    value = asked if asked is not None else allowed.default if allowed.default is not None else of_template
    if not allowed.min <= value <= allowed.max:
        raise Refused(Code.CLASS_LIMIT, f"{name} {value} {unit} is outside {allowed.min}..{allowed.max} {unit}")
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


def _network(request: CreateRequest, policy: WorkloadClass) -> NetworkSpec:
    """The request's, within the class: a class may close what a request cannot open."""
    network = request.network
    if network.internet and not policy.internet:
        network = replace(network, internet=False)
    if policy.ingress is Ingress.TOKEN and network.public_traffic:
        if not request.secured:
            raise Refused(Code.CLASS_LIMIT, f"class {policy.name} closes ports without a token, which needs a secured sandbox")
        network = replace(network, public_traffic=False)
    return network


def _timeout_s(request: CreateRequest, policy: WorkloadClass) -> int:
    timeout_s = request.timeout_s if request.timeout_s is not None else policy.timeout_s_default
    if timeout_s <= 0:
        raise Refused(Code.INVALID_REQUEST, f"timeout {timeout_s} s must be positive")
    if timeout_s > policy.timeout_s_max:
        raise Refused(Code.CLASS_LIMIT, f"timeout {timeout_s} s is longer than {policy.timeout_s_max} s")
    return timeout_s


def _check_template(template: Template, policy: WorkloadClass) -> None:
    if not template.image:
        raise Refused(Code.TEMPLATE_NOT_FOUND, f"template {template.name!r} has no build that is ready")
    if policy.templates and not {template.id, template.name, *template.aliases} & set(policy.templates):
        allowed = ", ".join(policy.templates)
        raise Refused(Code.CLASS_LIMIT, f"class {policy.name} does not take template {template.name}; it takes {allowed}")


def resolve(request: CreateRequest, *, template: Template, policy: WorkloadClass) -> Spec:
    """The class's defaults and limits over the template's build, and the request's overrides within them.

    *Errors*: Refused CLASS_LIMIT, INVALID_REQUEST.
    """
    timeout_s = _timeout_s(request, policy)
    _check_template(template, policy)
    _check_maps(request, policy)
    return Spec(
        class_name=policy.name,
        template_id=template.id,
        image=template.image,
        image_name=template.name,
        isolation=policy.isolation,
        cpu_millis=_within("CPU", request.cpu_millis, policy.cpu_millis, template.cpu_millis, "millicores"),
        memory_mib=_within("memory", request.memory_mib, policy.memory_mib, template.memory_mib, "MiB"),
        disk_mib=_within("disk", request.disk_mib, policy.disk_mib, template.disk_mib, "MiB"),
        pids_max=policy.pids_max,
        timeout_s=timeout_s,
        timeout_s_max=policy.timeout_s_max,
        on_end=request.on_end,
        end_mode=request.end_mode,
        auto_resume=request.auto_resume,
        on_exit=policy.on_exit,
        on_lease_expiry=policy.on_lease_expiry,
        on_loss=policy.on_loss,
        attempts_max=policy.attempts_max,
        default_user=template.default_user,
        default_workdir=template.default_workdir,
        command=template.command,
        command_user=template.command_user,
        ready_command=template.ready_command,
        network=_network(request, policy),
        arch=policy.arch,
        regions=policy.regions,
        labels=policy.labels,
        placement_policy=policy.placement_policy,
        placement_choices=policy.placement_choices,
        require_host=request.require_host,
        prefer_host=request.prefer_host,
        reserve_s=policy.reserve_s,
        image_s=policy.image_s,
        guest_ready_s=policy.guest_ready_s,
        start_s=policy.start_s,
        bootstrap_s=policy.bootstrap_s,
        pause_s=policy.pause_s,
        resume_s=policy.resume_s,
        save_s=policy.save_s,
        local_s=policy.local_s,
        release_s=policy.release_s,
        no_capacity_s=policy.no_capacity_s,
        create_patience_s=policy.create_patience_s,
    )
