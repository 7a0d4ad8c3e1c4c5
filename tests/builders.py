"""Values that tests start from: each call gives a whole, valid one, with what the test cares about replaced."""

from __future__ import annotations

import itertools
import random
from typing import Any

from atoll.base.ids import ClientId, Dice, HostId, PlacementId, Prefix, SandboxId, TeamId, TemplateId, new_id
from atoll.base.units import Vector
from atoll.domain.host import Admin, Host
from atoll.domain.placement import Holding, Placement
from atoll.domain.sandbox import Sandbox, State
from atoll.domain.spec import Isolation, Spec
from atoll.domain.template import Template
from atoll.domain.tenancy import Client, Role, Team, key_digest

NOW = 1_800_000_000.0
IMAGE = "sha256:" + "0" * 64

_numbers = itertools.count(1)


def seeded(seed: int) -> Dice:
    """Dice that fall the same way each time."""
    return random.Random(seed).randbytes


_dice = seeded(1)


def fresh(prefix: Prefix) -> str:
    return new_id(prefix, _dice)


def spec(**changes: Any) -> Spec:
    values: dict[str, Any] = {
        "class_name": "default",
        "template_id": "tpl",
        "image": IMAGE,
        "image_name": "base",
        "isolation": Isolation.GVISOR,
        "cpu_millis": 1000,
        "memory_mib": 512,
        "disk_mib": 2048,
        "pids_max": 4096,
        "timeout_s": 300,
    }
    return Spec(**{**values, **changes})


def sandbox(**changes: Any) -> Sandbox:
    values: dict[str, Any] = {
        "id": SandboxId(fresh(Prefix.SANDBOX)),
        "revision": 1,
        "team_id": TeamId("tea_ours"),
        "client_id": ClientId("cli_ours"),
        "state": State.PENDING,
        "spec": spec(),
        "generation": 1,
        "created_at": NOW,
        "end_at": None,
        "end_revision": 0,
    }
    return Sandbox(**{**values, **changes})


def placement(of: Sandbox, **changes: Any) -> Placement:
    values: dict[str, Any] = {
        "id": PlacementId(fresh(Prefix.PLACEMENT)),
        "sandbox_id": of.id,
        "host_id": HostId("hst_one"),
        "generation": of.generation,
        "holding": Holding.RESERVED,
        "vector": of.spec.vector(),
        "nonce": "once",
        "created_at": NOW,
    }
    return Placement(**{**values, **changes})


def host(**changes: Any) -> Host:
    number = next(_numbers)
    values: dict[str, Any] = {
        "id": HostId(fresh(Prefix.HOST)),
        "revision": 1,
        "name": f"host-{number}",
        "admin": Admin.ACTIVE,
        "capacity": Vector(16_000, 8192, 65_536, 64),
        "arch": "x86_64",
        "region": "local",
        "seen_at": NOW,
        "isolations": frozenset({"gvisor", "shared-kernel"}),
        "images": frozenset({IMAGE}),
    }
    return Host(**{**values, **changes})


def team(**changes: Any) -> Team:
    number = next(_numbers)
    values: dict[str, Any] = {
        "id": TeamId(fresh(Prefix.TEAM)),
        "name": f"team-{number}",
    }
    return Team(**{**values, **changes})


def client(of: Team, **changes: Any) -> Client:
    key = f"e2b_{next(_numbers):040x}"
    values: dict[str, Any] = {
        "id": ClientId(fresh(Prefix.CLIENT)),
        "team_id": of.id,
        "name": "a key",
        "role": Role.MEMBER,
        "key_digest": key_digest(key),
        "key_hint": key[-4:],
        "created_at": NOW,
    }
    return Client(**{**values, **changes})


def template(**changes: Any) -> Template:
    values: dict[str, Any] = {
        "id": TemplateId(fresh(Prefix.TEMPLATE).removeprefix(Prefix.TEMPLATE)),
        "team_id": None,
        "name": "base",
        "aliases": ("base",),
        "public": True,
        "build_id": "00000000-0000-4000-8000-000000000000",
        "image": IMAGE,
        "cpu_millis": 1000,
        "memory_mib": 512,
        "disk_mib": 2048,
        "default_user": "user",
        "default_workdir": None,
        "created_at": NOW,
        "updated_at": NOW,
    }
    return Template(**{**values, **changes})
