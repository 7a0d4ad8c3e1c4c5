"""Beginning: what a create begins from, a template's build or a kept moment of another sandbox, and what that fixes. Pure.

Theory of operation. A moment is of one isolation and one size: memory that was saved fits only into what it was saved from, and so does
a disk; and until it is in the artifact store it is of one host. So all of these are the snapshot's, and a request that names others is refused
rather than answered with something else. What
separates a sandbox from others (tokens, network, end, metadata) is the request's own, as in any create. A head start is a build's moment in
which its start command is ready: a create that fits it begins from it where its host has it, and any other boots; none is refused for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.base.ids import TemplateId
from atoll.base.records import replace
from atoll.domain.deployment import WorkloadClass
from atoll.domain.snapshot import Copy, Purpose, Snapshot
from atoll.domain.spec import Origin, Spec
from atoll.domain.template import Template
from atoll.planning.resolve import CreateRequest

Shape = Callable[[Spec], Spec]

_FIXED: Final = ("cpu_millis", "memory_mib", "disk_mib")
_AS_KEPT: Final = (
    *_FIXED,
    "isolation",
    "arch",
    "image",
    "pids_max",
    "tmp_on_disk",
    "default_user",
    "default_workdir",
    "command",
    "command_user",
    "ready_command",
)


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a create begins from. `request`: with what that fixes."""

    request: CreateRequest
    template: Template
    shape: Shape | None = None
    snapshot: Snapshot | None = None
    on_record: bool = True
    """Its template is one that users name, and whose use is counted."""


def of_snapshot(snapshot: Snapshot, request: CreateRequest, *, host_name: str = "") -> Beginning:
    """A create from a snapshot. *Errors*: Refused INVALID_REQUEST when the request wants what the snapshot is not."""
    spec = snapshot.spec
    for name in _FIXED:
        asked, has = getattr(request, name), getattr(spec, name)
        if asked is not None and asked != has:
            raise Refused(Code.INVALID_REQUEST, f"{name} of what begins from a snapshot is the snapshot's, {has}; leave it out")
    elsewhere = request.require_host not in (None, snapshot.host_id, host_name or None)
    if elsewhere and snapshot.moment is None:
        raise Refused(Code.INVALID_REQUEST, f"snapshot {snapshot.reference!r} is on host {host_name or snapshot.host_id} alone")
    fixed = replace(
        request,
        class_name=request.class_name or spec.class_name,
        cpu_millis=spec.cpu_millis,
        memory_mib=spec.memory_mib,
        disk_mib=spec.disk_mib,
        # Whether it has to be there is asked when a host is looked for: it may be in the store by then.
        require_host=request.require_host if elsewhere else snapshot.host_id,
        prefer_host=None,
    )
    pinned = request.require_host is None
    return Beginning(fixed, _as_template(snapshot), lambda made: _shaped(made, snapshot, pinned=pinned), snapshot, on_record=False)


def check_class(snapshot: Snapshot, policy: WorkloadClass) -> None:
    """*Errors*: Refused CLASS_LIMIT when the class separates in another way than the snapshot was."""
    if snapshot.spec.isolation not in policy.rungs():
        message = f"class {policy.name} isolates by {policy.isolation}, and snapshot {snapshot.reference!r} is of {snapshot.spec.isolation}"
        raise Refused(Code.CLASS_LIMIT, message)


def head_start(spec: Spec, moment: Snapshot) -> Spec | str:
    """The spec of a create that begins with what its template's build has kept; or why it boots instead.

    What the request has of an environment is no reason: it is for commands that begin later.
    """
    for name in _AS_KEPT:
        if getattr(spec, name) != getattr(moment.spec, name):
            return f"{name} is {getattr(spec, name)}, and {getattr(moment.spec, name)} where the start command was kept"
    here = moment.host_id if moment.copy is Copy.HERE else None
    prefer = spec.prefer_host if spec.prefer_host is not None else here
    # Of which kind it is, a host of another is told too: it says that, and not that it has no copy.
    kind = moment.moment.kind if moment.moment is not None else ""
    return replace(spec, origin=Origin(moment.id, moment.mode, or_boot=True, kind=kind), prefer_host=prefer)


def _shaped(made: Spec, snapshot: Snapshot, *, pinned: bool) -> Spec:
    """The request's spec, with everything that is a part of what was kept as it was there."""
    was = snapshot.spec
    return replace(
        made,
        template_id=snapshot.id if snapshot.purpose is Purpose.KEPT else was.template_id,
        image_name=was.image_name,
        manifest=was.manifest,
        pids_max=was.pids_max,
        tmp_on_disk=was.tmp_on_disk,
        isolation=was.isolation,
        arch=was.arch,
        regions=(),
        labels=(),
        origin=Origin(snapshot.id, snapshot.mode, pinned=pinned),
    )


def _as_template(snapshot: Snapshot) -> Template:
    spec = snapshot.spec
    return Template(
        id=TemplateId(spec.template_id),
        team_id=snapshot.team_id,
        name=spec.image_name,
        aliases=(),
        public=False,
        build_id="",
        image=spec.image,
        cpu_millis=spec.cpu_millis,
        memory_mib=spec.memory_mib,
        disk_mib=spec.disk_mib,
        default_user=spec.default_user,
        default_workdir=spec.default_workdir,
        created_at=snapshot.created_at,
        updated_at=snapshot.created_at,
        env=snapshot.env,
        command=spec.command,
        command_user=spec.command_user,
        ready_command=spec.ready_command,
    )
