"""Where everything of one instance is. Pure paths: making them is `instance.py`'s business."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import atoll
from atoll.client.target import CONFIG_FILE, OPERATOR_KEY_FILE, home_directory

CACHE_DEFAULT: Final = Path("/var/cache/atoll")
USER: Final = "atoll"
"""The system user of control and edge."""
PROCESSES: Final = ("control", "agent", "edge", "registry")
"""In the order in which they start; they end in the opposite one, control last."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths below one ATOLL_HOME."""

    home: Path

    @property
    def config(self) -> Path:
        return self.home / CONFIG_FILE

    @property
    def host_config(self) -> Path:
        """Of a machine that joined over the network; it has no `config`."""
        return self.home / "host.toml"

    @property
    def authority(self) -> Path:
        """Who signs control's certificate, as the machine was told when it joined."""
        return self.home / "authority.pem"

    @property
    def control_config(self) -> Path:
        """What the operator decides about control's process; optional, and never written by `up`."""
        return self.home / "control.toml"

    @property
    def tls_authority(self) -> Path:
        """Of certificates that were made here; for everybody."""
        return self.home / "tls-authority.pem"

    @property
    def tls_authority_key(self) -> Path:
        """For root alone: control never needs it."""
        return self.home / "tls-authority.key"

    @property
    def operator_key(self) -> Path:
        return self.home / OPERATOR_KEY_FILE

    @property
    def secrets(self) -> Path:
        return self.home / "secrets"

    @property
    def control(self) -> Path:
        return self.home / "control"

    @property
    def database(self) -> Path:
        return self.control / "atoll.db"

    @property
    def bootstrap(self) -> Path:
        return self.control / "bootstrap.json"

    @property
    def agent(self) -> Path:
        return self.home / "agent"

    @property
    def enrollment_token(self) -> Path:
        return self.agent / "enroll.token"

    @property
    def credential(self) -> Path:
        return self.agent / "credential"

    @property
    def blobs(self) -> Path:
        """Control's store of images' blobs; the agent of this machine reads it."""
        return self.control / "images"

    @property
    def fetched(self) -> Path:
        """Blobs that the agent of a machine that joined has fetched from control."""
        return self.agent / "blobs"

    @property
    def machine_files(self) -> Path:
        """What this host's virtual machines boot by, as the deployment has signed it."""
        return self.agent / "machine"

    @property
    def images(self) -> Path:
        """Root file systems that the agent has made of blobs."""
        return self.agent / "images"

    @property
    def registry(self) -> Path:
        """What the registry has: the engine's files, its configuration, its socket."""
        return self.home / "registry"

    @property
    def registry_config(self) -> Path:
        return self.registry / "registry.json"

    @property
    def registry_socket(self) -> Path:
        """Where edge and operator reach the registry; nobody else can."""
        return self.registry / "registry.sock"

    @property
    def firecracker(self) -> Path:
        """Which Firecracker machines run by; without it they run by QEMU."""
        return self.home / "firecracker.toml"

    @property
    def sandboxes(self) -> Path:
        return self.home / "sandboxes"

    @property
    def run(self) -> Path:
        return self.home / "run"

    @property
    def log(self) -> Path:
        return self.home / "log"

    @property
    def edge_config(self) -> Path:
        return self.run / "edge.json"

    @property
    def socket(self) -> Path:
        return self.run / "supervisor.sock"

    @property
    def agent_health(self) -> Path:
        """Written by the agent after each answered poll; says to `status` that it is heard."""
        return self.run / "agent.health.json"

    @property
    def agent_socket(self) -> Path:
        """Where the running agent says what it holds."""
        return self.run / "agent.sock"

    @property
    def image_socket(self) -> Path:
        """Where the running agent is asked about its images."""
        return self.run / "images.sock"

    @property
    def fake_machine(self) -> Path:
        """What a fake driver's machine consists of."""
        return self.home / "fake-machine"

    def pid_file(self, name: str) -> Path:
        return self.run / f"{name}.pid"

    def lock_file(self, name: str) -> Path:
        return self.run / f"{name}.lock"

    def log_file(self, name: str) -> Path:
        return self.log / f"{name}.log"


def layout_of(environ: Mapping[str, str] = os.environ) -> Layout:
    """The instance that this process is about."""
    return Layout(home_directory(environ).absolute())


def repository() -> Path:
    """The checkout that this code runs from."""
    return Path(atoll.__file__).resolve().parents[2]


BINARIES: Final = ("atoll-guest", "atoll-io", "atoll-registry", "runsc")
"""What an instance runs that is not Python."""


def bin_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where BINARIES are: ATOLL_BIN, else the build directory of the checkout."""
    named = environ.get("ATOLL_BIN")
    return Path(named) if named else repository() / "build" / "bin"


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where templates are kept, shared by the instances of this machine: ATOLL_CACHE."""
    return Path(environ.get("ATOLL_CACHE") or CACHE_DEFAULT)


def python() -> Path:
    """The interpreter that children run with: the one of this environment, by its own path and not by where its link leads."""
    return Path(sys.executable)
