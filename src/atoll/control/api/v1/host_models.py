"""The objects of `/v1` about hosts: what a machine has, grants and holds, and how it becomes one."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from atoll.control.api.v1.models import INT32_MAX, Amount, Incoming, Outgoing, Text, Whole, like
from atoll.domain.host import Admin, Health


class NewEnrollmentToken(Incoming):
    """For one host of this name, once."""

    model_config = like({"hostName": "rack-7", "lifeSeconds": 900})

    host_name: Annotated[Text, Field(min_length=1, max_length=128)]
    life_seconds: Annotated[int, Field(ge=1, le=3600)] = 3600


class InventoryRequest(Incoming):
    """What a machine has."""

    model_config = like({"cpuCount": 16, "memoryMib": 64_000, "diskMib": 900_000})

    cpu_count: Annotated[int, Field(ge=1, le=65536)]
    memory_mib: Annotated[int, Field(ge=1, le=INT32_MAX)]
    disk_mib: Annotated[int, Field(ge=1, le=INT32_MAX)]


class AmountRequest(Incoming):
    """Capacity, or what is kept back of it."""

    model_config = like({"cpuMillis": 32_000, "memoryMib": 60_000, "diskMib": 800_000, "slots": 500})

    cpu_millis: Whole = 0
    memory_mib: Whole = 0
    disk_mib: Whole = 0
    slots: Whole = 0


class OvercommitRequest(Incoming):
    """How many times what is there may be promised."""

    model_config = like({"cpu": 2.0, "memory": 1.0, "disk": 1.0})

    cpu: Annotated[float, Field(gt=0, le=1000)] = 1.0
    memory: Annotated[float, Field(gt=0, le=1000)] = 1.0
    disk: Annotated[float, Field(gt=0, le=1000)] = 1.0


class NewHost(Incoming):
    """A host by an operator's word. `credentialDigest` is the SHA-256 of the credential that the host has made and keeps."""

    model_config = like(
        {
            "credentialDigest": "a8" * 32,
            "arch": "amd64",
            "inventory": {"cpuCount": 16, "memoryMib": 64_000, "diskMib": 900_000},
            "capacity": {"cpuMillis": 32_000, "memoryMib": 60_000, "diskMib": 800_000, "slots": 500},
            "overcommit": {"cpu": 2.0, "memory": 1.0, "disk": 1.0},
        }
    )

    credential_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    arch: Annotated[Text, Field(min_length=1, max_length=32)]
    inventory: InventoryRequest
    capacity: AmountRequest
    reserve: AmountRequest = AmountRequest()
    overcommit: OvercommitRequest = OvercommitRequest()
    slots: Annotated[str | None, Field(pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$", max_length=64)] = None
    region: Annotated[Text, Field(min_length=1, max_length=64)] = "local"
    labels: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)


class Disabling(Incoming):
    """`off`: the operator knows that the machine is off; its sandboxes count as gone at once, and not after its last lease."""

    model_config = like({"off": True})

    off: bool = False


class Inventory(Outgoing):
    """What a machine has."""

    cpu_count: int
    memory_mib: int
    disk_mib: int


class Overcommit(Outgoing):
    """How many times it may be promised."""

    cpu: float
    memory: float
    disk: float


class Registered(Outgoing):
    """What the capacity was reckoned from: what the machine had, without the reserve, times the overcommit (null: it did not say)."""

    inventory: Inventory
    reserve: Amount
    overcommit: Overcommit | None
    slots: str | None


class HostCondition(Outgoing):
    """What keeps a host from taking sandboxes. Where `detail` is empty, `atoll agent doctor` on that machine knows more."""

    id: str
    detail: str


class Host(Outgoing):
    """A host. `problems` are ids of checks that failed; any makes it unschedulable, and `conditions` says what is known about each."""

    id: str
    revision: int
    name: str
    admin: Admin
    health: Health
    arch: str
    region: str
    labels: dict[str, str]
    isolations: list[str]
    goes_on_from: Annotated[list[str], Field(description="Kinds of moments that guests can begin from there")]
    capacity: Amount
    used: Amount
    sandboxes: int
    warm: Annotated[int, Field(description="Of these sandboxes, guests that are made ahead and nobody's yet")] = 0
    problems: list[str]
    conditions: list[HostCondition]
    registered: Registered | None
    reported: Inventory | None
    agent_version: str | None
    seen_at: str | None
    lease_until: str | None
    facts: dict[str, str]


class HostList(Outgoing):
    items: list[Host]
    next_cursor: str | None


class EnrollmentToken(Outgoing):
    """A token, shown this once."""

    token: str
    host_name: str
    expires_at: str
