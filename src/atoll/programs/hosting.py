"""Hosting: how this machine is a host. `host.toml` of one that joined over the network, or what follows from the instance that `up` made.

Theory of operation. A machine that joined has an ATOLL_HOME without control and edge: `host.toml` in the place of `config.toml`, `agent/`
with its credential and journal, `sandboxes/`, `run/` and `log/`. The file is written before the machine enrols, and what is in it is what
it enrolled with. Everything that acts for a host (the agent, `doctor`, the sweep of `down`) reads it through `load`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import Code, Refused
from atoll.base.ids import Prefix, is_id
from atoll.domain.inventory import Overcommit
from atoll.domain.moment import HEAD_START_WAIT_S
from atoll.programs import instance, subnets
from atoll.programs.files import make_directory, write_whole
from atoll.programs.layout import Layout
from atoll.programs.machines import Machines

SLOTS: Final = 2048
HEAD_START_WAIT_S_MAX: Final = 60.0
OVERCOMMIT: Final = Overcommit(cpu=16.0, memory=1.0, disk=8.0)
"""Disks of sandboxes are sparse; what is really free is looked at again when one is made."""


class DriverName(StrEnum):
    """What holds the sandboxes."""

    OCI = "oci"
    FAKE = "fake"
    """Rows in files, for rigs and demonstrations: nothing runs."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """What the operator keeps back. *Units*: millicores, MiB."""

    cpu_millis: int = 0
    memory_mib: int = 0
    disk_mib: int = 0


NO_RESERVE: Final = Reserve()


@dataclass(frozen=True, slots=True)
class HostConfig:
    """How this machine is a host."""

    install_id: str
    name: str
    control: tuple[str, ...]
    """Every replica's address."""
    subnet: int | None = None
    """Of `subnets`; None: its driver needs no addresses."""
    region: str = "local"
    labels: Mapping[str, str] = field(default_factory=dict)
    reserve: Reserve = NO_RESERVE
    overcommit: Overcommit = OVERCOMMIT
    slots: int = SLOTS
    authority: Path | None = None
    """Who signs control's certificate, where the machine does not know it."""
    driver: DriverName = DriverName.OCI
    machines: Machines = Machines.OFF
    head_start_wait_s: float = HEAD_START_WAIT_S
    """How long a create waits for a template's kept start command that is fetched, before it begins it anew."""
    joined: bool = False
    """Over the network: there is no instance around it."""

    @property
    def control_url(self) -> str:
        return self.control[0]

    @property
    def slot_cidr(self) -> str | None:
        return None if self.subnet is None else subnets.cidr(self.subnet)


def load(place: Layout) -> HostConfig:
    """*Errors*: Refused NOT_RUNNING when the machine is no host there, SETUP_FAILED (its configuration is broken)."""
    if place.host_config.exists():
        return _read(place)
    return of_instance(instance.load(place))


def of_instance(config: instance.Config) -> HostConfig:
    """The host that an instance brings along."""
    return HostConfig(config.install_id, config.host_name, (config.control_url,), config.subnet, machines=config.machines)


def _read(place: Layout) -> HostConfig:
    try:
        raw = tomllib.loads(place.host_config.read_text())
        found = _of(place, raw)
    except (OSError, KeyError, ValueError, TypeError, tomllib.TOMLDecodeError) as error:
        raise Refused(
            Code.SETUP_FAILED,
            f"{place.host_config} cannot be used: {type(error).__name__} {error}",
            hint="Mend the file; a host cannot live without its install id.",
        ) from error
    if not is_id(Prefix.INSTALL, found.install_id) or not (found.subnet is None or 0 <= found.subnet < subnets.COUNT):
        raise Refused(Code.SETUP_FAILED, f"{place.host_config} has an install id or a subnet that is none")
    return found


def _of(place: Layout, raw: Mapping[str, Any]) -> HostConfig:
    over, kept, authority = raw.get("overcommit", {}), raw.get("reserve", {}), raw.get("authority")
    return HostConfig(
        install_id=str(raw["install_id"]),
        name=str(raw["name"]),
        control=tuple(str(url) for url in raw["control"]) or ("",),
        subnet=None if raw.get("subnet") is None else int(raw["subnet"]),
        region=str(raw.get("region", "local")),
        labels={str(name): str(value) for name, value in raw.get("labels", {}).items()},
        reserve=Reserve(int(kept.get("cpu_millis", 0)), int(kept.get("memory_mib", 0)), int(kept.get("disk_mib", 0))),
        overcommit=Overcommit(float(over.get("cpu", 1.0)), float(over.get("memory", 1.0)), float(over.get("disk", 1.0))),
        slots=int(raw.get("slots", SLOTS)),
        authority=None if not authority else place.home / str(authority),
        driver=DriverName(str(raw.get("driver", DriverName.OCI))),
        machines=Machines(str(raw.get("machines", Machines.OFF))),
        head_start_wait_s=_seconds(raw.get("head_start_wait_s", HEAD_START_WAIT_S)),
        joined=True,
    )


def _seconds(value: object) -> float:
    seconds = float(str(value))
    if not 0 <= seconds <= HEAD_START_WAIT_S_MAX:
        raise ValueError(f"head_start_wait_s is between 0 and {HEAD_START_WAIT_S_MAX:g}")
    return seconds


def save(place: Layout, config: HostConfig) -> None:
    """Write `host.toml`, whole or not at all. *Idempotency*: the same again writes nothing."""
    text = _text(place, config)
    if not place.host_config.exists() or place.host_config.read_text() != text:
        write_whole(place.host_config, text, mode=0o644)


def _text(place: Layout, config: HostConfig) -> str:
    authority = config.authority
    if authority is not None and authority.is_relative_to(place.home):
        authority = authority.relative_to(place.home)
    kept, over = config.reserve, config.overcommit
    lines = [
        "# Written by `atoll agent join`. The install id marks everything on this machine that belongs to this host: never change it.",
        f"install_id = {json.dumps(config.install_id)}",
        f"name = {json.dumps(config.name)}",
        "# Every replica of control: another one is dialled when one does not answer.",
        f"control = {json.dumps(list(config.control))}",
        *([f"authority = {json.dumps(str(authority))}"] if authority is not None else []),
        "# Addresses of sandboxes are in 10.(64 + subnet).0.0/16.",
        *([f"subnet = {config.subnet}"] if config.subnet is not None else []),
        f"driver = {json.dumps(config.driver.value)}",
        "# Virtual machines: off, kvm, or emulated (without hardware virtualization, too). May be changed; the agent reads it when it starts.",
        f"machines = {json.dumps(config.machines.value)}",
        "# How long a create waits for a template's kept start command that has to be fetched, before it begins it anew. As `machines`.",
        f"head_start_wait_s = {config.head_start_wait_s:g}",
        "# What follows is registered with control. To change it, drain, disable and reset the host, and join again.",
        f"region = {json.dumps(config.region)}",
        f"slots = {config.slots}",
        f"reserve = {{ cpu_millis = {kept.cpu_millis}, memory_mib = {kept.memory_mib}, disk_mib = {kept.disk_mib} }}",
        f"overcommit = {{ cpu = {over.cpu}, memory = {over.memory}, disk = {over.disk} }}",
        "[labels]",
        *(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in sorted(config.labels.items())),
    ]
    return "\n".join(lines) + "\n"


def ensure_directories(place: Layout) -> None:
    """Have a joined host's directories, all root's."""
    root = (0, 0)
    make_directory(place.home, mode=0o755, owner=root)
    make_directory(place.agent, mode=0o700, owner=root)
    make_directory(place.sandboxes, mode=0o711, owner=root)
    make_directory(place.run, mode=0o755, owner=root)
    make_directory(place.log, mode=0o750, owner=root)
