"""The deployment document's normal form: every value in one order, none left out that has one, no comments.

`deployment.read` takes it back to the same value. Two documents are compared by it, so that comments, order and what is only written out
are no difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from atoll.domain.deployment import BuildLimits, Deployment, Range, Rate, TeamLimits, WorkloadClass
from atoll.domain.spec import PlacementPolicy
from atoll.wire import quantities as q
from atoll.wire.deployment import UNLIMITED
from atoll.wire.document import Tree

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Change:
    """What is different about one value; None: it is not there."""

    path: str
    before: str | None
    after: str | None


def write(deployment: Deployment) -> str:
    """The document's normal form: every value in one order, none left out that has one."""
    lines = [f"version: {VERSION}"]
    lines += _lines(normal(deployment), 0)
    return "\n".join(lines) + "\n"


def changes(before: Deployment, after: Deployment) -> list[Change]:
    """What applying `after` would change, in the normal form's order. *Idempotency*: empty for two that mean the same."""
    old, new = dict(_leaves(normal(before), ())), dict(_leaves(normal(after), ()))
    order = list(dict.fromkeys([*new, *old]))
    return [Change(".".join(path), old.get(path), new.get(path)) for path in order if old.get(path) != new.get(path)]


def normal(deployment: Deployment) -> dict[str, Tree]:
    """The document as a tree, without its version."""
    total = deployment.deployment
    limits: dict[str, Tree] = {
        "client": _limits(deployment.client.requests, sandboxes=deployment.client.sandboxes),
        "team": _team(deployment.team),
        "deployment": _limits(
            total.requests,
            sandboxes=total.sandboxes,
            records=total.records,
            registered_hosts=total.registered_hosts,
            warm_guests=total.warm_guests,
            active_hosts=total.active_hosts,
        )
        | {"moment": UNLIMITED if total.moment_mib is None else q.write_mib(total.moment_mib)},
    }
    tree: dict[str, Tree] = {"default_class": deployment.default_class, "limits": limits, "builds": _builds(deployment.builds)}
    if deployment.teams:
        tree["teams"] = {name: _team(one) for name, one in sorted(deployment.teams.items())}
    if deployment.public_repositories:
        tree["registry"] = {"public": list(deployment.public_repositories)}
    tree["classes"] = {name: _class(policy) for name, policy in deployment.classes.items()}
    return tree


def _team(one: TeamLimits) -> dict[str, Tree]:
    storage = UNLIMITED if one.registry_mib is None else q.write_mib(one.registry_mib)
    return {**_limits(one.requests, sandboxes=one.sandboxes, records=one.records), "registry": storage}


def _builds(limits: BuildLimits) -> Tree:
    return {
        "whole": q.write_duration(limits.whole_s),
        "step": q.write_duration(limits.step_s),
        "start": q.write_duration(limits.start_s),
    }


def _limits(rate: Rate | None, **counts: int | None) -> dict[str, Tree]:
    tree: dict[str, Tree] = {"request_rate": UNLIMITED if rate is None else q.write_rate(rate.per_s)}
    if rate is not None and rate.burst is not None:
        tree["burst"] = int(rate.burst)
    return {**tree, **{name: UNLIMITED if count is None else count for name, count in counts.items()}}


def _range(allowed: Range, form: Callable[[int], Tree]) -> Tree:
    tree: dict[str, Tree] = {"min": form(allowed.min), "max": form(allowed.max)}
    return tree if allowed.default is None else {**tree, "default": form(allowed.default)}


def _present(**values: Tree) -> dict[str, Tree]:
    return {name: value for name, value in values.items() if value}


def _class(policy: WorkloadClass) -> dict[str, Tree]:
    placement: dict[str, Tree] = {"policy": policy.placement_policy.value}
    if policy.placement_policy is PlacementPolicy.SPREAD:
        placement["choices"] = policy.placement_choices
    return {
        **_present(description=policy.description),
        "isolation": policy.isolation.value,
        "or_stronger": policy.or_stronger,
        **_present(template=policy.template, templates=list(policy.templates)),
        "size": {
            "cpu": _range(policy.cpu_millis, q.cpu_form),
            "memory": _range(policy.memory_mib, q.write_mib),
            "disk": _range(policy.disk_mib, q.write_mib),
            "processes": policy.pids_max,
        },
        "lifetime": {"default": q.write_duration(policy.timeout_s_default), "max": q.write_duration(policy.timeout_s_max)},
        "timeouts": _timeouts(policy),
        "attempts": policy.attempts_max,
        "ingress": policy.ingress.value,
        "internet": policy.internet,
        "arch": policy.arch,
        **_present(regions=list(policy.regions), labels=dict(policy.labels)),
        "placement": placement,
        "on_exit": policy.on_exit.value,
        "on_lease_expiry": policy.on_lease_expiry.value,
        "on_loss": policy.on_loss.value,
        "requests": {
            "metadata_pairs": policy.metadata_pairs_max,
            "metadata_bytes": policy.metadata_bytes_max,
            "environment_pairs": policy.env_pairs_max,
            "environment_bytes": policy.env_bytes_max,
        },
    }


def _timeouts(policy: WorkloadClass) -> Tree:
    return {
        "reserve": q.write_duration(policy.reserve_s),
        "image": q.write_duration(policy.image_s),
        "guest_ready": q.write_duration(policy.guest_ready_s),
        "start": q.write_duration(policy.start_s),
        "bootstrap": q.write_duration(policy.bootstrap_s),
        "pause": q.write_duration(policy.pause_s),
        "resume": q.write_duration(policy.resume_s),
        "save": q.write_duration(policy.save_s),
        "local": q.write_duration(policy.local_s),
        "release": q.write_duration(policy.release_s),
        "no_capacity": q.write_duration(policy.no_capacity_s),
        "patience": q.write_duration(policy.create_patience_s),
    }


_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9._/-]*|[0-9]+(\.[0-9]+)?[A-Za-z/]+[A-Za-z]*")


def _scalar(value: Tree) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    text = str(value)
    if _PLAIN.fullmatch(text) and text not in ("true", "false", "null"):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t") + '"'


def _lines(tree: Tree, depth: int) -> list[str]:
    assert isinstance(tree, dict)
    lines: list[str] = []
    for key, value in tree.items():
        head = "  " * depth + _scalar(key) + ":"
        if isinstance(value, dict) and value:
            lines += [head, *_lines(value, depth + 1)]
        elif isinstance(value, dict):
            lines.append(head + " {}")
        elif isinstance(value, list):
            lines.append(head + " [" + ", ".join(map(_scalar, value)) + "]")
        else:
            lines.append(head + " " + _scalar(value))
    return lines


def _leaves(tree: Tree, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(tree, list):
        yield path, ", ".join(map(str, tree))
    else:
        yield path, _scalar(tree)


BUILT_IN: Final = write(Deployment())
"""What applies until an operator has applied a document."""
