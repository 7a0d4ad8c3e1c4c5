"""What an instance decides for its containers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from atoll.drivers.port import Mark
from atoll.images.unpacking import Unpacking

_BASE36: Final = "0123456789abcdefghijklmnopqrstuvwxyz"


class RuntimeKind(StrEnum):
    """Which runtime a driver instance starts."""

    RUNSC = "runsc"
    CRUN = "crun"
    QEMU = "qemu"
    """No container at all: a virtual machine (`drivers/machines`), which shares the rest with them. With KVM."""
    QEMU_EMULATED = "qemu-emulated"
    FIRECRACKER = "firecracker"


@dataclass(frozen=True, slots=True)
class Names:
    """How everything of one instance is called on the machine. Others' names are never touched."""

    install: str
    """The first eight characters of the install id's body."""

    @classmethod
    def of(cls, mark: Mark) -> Names:
        """Names for an install id such as `ins_abcdefgh...`."""
        return cls(mark.install_id.removeprefix("ins_")[:8])

    @property
    def cgroup(self) -> str:
        """The parent control group."""
        return f"atoll-{self.install}"

    @property
    def table(self) -> str:
        """The nftables table, with its family."""
        return f"inet atoll_{self.install}"

    @property
    def link_prefix(self) -> str:
        """What the names of its interfaces begin with; with the slot's number they have at most 12 characters."""
        return f"at{self.install[:6]}"

    def link(self, slot: int) -> str:
        """The host's end of a slot's veth pair."""
        return self.link_prefix + base36(slot)

    def slot(self, link: str) -> int | None:
        """The slot's number in an interface's name, or None when it is not one of ours."""
        digits = link.removeprefix(self.link_prefix)
        if digits == link or not digits or any(c not in _BASE36 for c in digits):
            return None
        return int(digits, 36)

    @property
    def gateway_link(self) -> str:
        """The device that carries the gateway's address; upper case keeps it apart from slots."""
        return f"{self.link_prefix}GW"


def base36(number: int) -> str:
    """Digits and lower-case letters, no leading zeros."""
    digits = ""
    while True:
        number, rest = divmod(number, 36)
        digits = _BASE36[rest] + digits
        if number == 0:
            return digits


DISK_SPARE_MIB: Final = 512


@dataclass(frozen=True, slots=True)
class OciConfig:
    """Everything one driver instance needs to know. *Units*: MiB, processes."""

    runtime: RuntimeKind
    state_dir: Path
    """`ATOLL_HOME/sandboxes`: one directory per placement. Shared by both runtimes; the record says whose it is."""
    run_dir: Path
    """`ATOLL_HOME/run/oci`: the runtimes' own state."""
    image_cache: Path
    """`/var/cache/atoll`: what `atoll.images.cache` reads."""
    guest_binary: Path
    mark: Mark
    runsc: Path = Path("/usr/local/bin/runsc")
    crun: Path = Path("/usr/bin/crun")
    runc: Path = Path("/usr/sbin/runc")
    tmpfs_percent: tuple[int, int, int] = (40, 20, 10)
    """Sizes of /tmp, /dev/shm and /run in percent of the guest's memory: together less than all of it, since a full one is nobody's
    fault whom the kernel could end for it."""
    console_bytes_max: int = 1 << 20
    """The console file is cut to its last half when it grows beyond this."""
    disk_spare_mib: int = DISK_SPARE_MIB
    """`prepare` is refused when the host's disk has less than this free."""
    unpacking: Unpacking | None = None
    """Makes images that the cache does not have; None: what is not there is unavailable."""
    packer: Path | None = None
    """`atoll-io`, which makes layers of what guests write; None: none are made."""
    guest_command: tuple[str, ...] = ()
    """For tests: run this in place of the guest binary."""
    closed_ranges: tuple[str, ...] = field(default=())
    """More destinations that no guest may reach, e.g. the host's management network."""
