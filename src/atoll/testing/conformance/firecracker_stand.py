"""The stand of the `firecracker` driver: with the strict one of `testing/firecracker`, or with real programs where ATOLL_TEST_KVM=1 names them."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import atoll
from atoll.drivers.firecracker.build import firecracker_driver
from atoll.drivers.firecracker.config import FirecrackerConfig
from atoll.drivers.machines.config import Accelerator
from atoll.drivers.oci.config import OciConfig
from atoll.drivers.oci.driver import OciDriver
from atoll.drivers.oci.slots import SlotPool
from atoll.drivers.qemu.config import OVERHEAD_MIB
from atoll.testing.conformance import qemu_stand
from atoll.testing.conformance.qemu_stand import QemuStand
from atoll.testing.firecracker.contract import VARIABLE

EMULATION_MIB: Final = OVERHEAD_MIB[Accelerator.TCG] + 64
"""What the strict one takes beside what a real one does: QEMU, and Python."""
REAL: Final = "ATOLL_FIRECRACKER"
"""A directory with the real `firecracker` and `jailer`."""


def missing(binaries: Path, cache: Path, environ: Mapping[str, str] = os.environ) -> str | None:
    """What this machine lacks for the stand, and how to get it; None when nothing."""
    if environ.get("ATOLL_TEST_KVM") == "1":
        directory = Path(environ.get(REAL, "/none"))
        for name in ("firecracker", "jailer"):
            if not (directory / name).exists():
                return f"{name} in the directory that {REAL} names (it comes from no package)"
    elif not (cache / "kernels" / "current" / "vmlinux").exists():
        return "an unpacked kernel (scripts/setup.py --only machines)"
    return qemu_stand.missing(binaries, cache)


def pinned(config: FirecrackerConfig) -> FirecrackerConfig:
    """The same with the digests of the programs that are there."""
    first, second = (hashlib.sha256(path.read_bytes()).hexdigest() for path in (config.firecracker, config.jailer))
    return FirecrackerConfig(
        config.cache,
        boot_s=config.boot_s,
        firecracker=config.firecracker,
        firecracker_sha256=first,
        jailer=config.jailer,
        jailer_sha256=second,
        rates=config.rates,
    )


def strict_programs(directory: Path, *, contract: str | None) -> tuple[Path, Path]:
    """Have the strict pair in a directory, as two programs. `contract`: the path of the description, where there is one."""
    directory.mkdir(parents=True, exist_ok=True)
    places = os.pathsep.join((str(Path(atoll.__file__).parent.parent), sysconfig.get_paths()["purelib"]))
    settings = {"PYTHONPATH": places, "PYTHONHOME": sys.base_prefix, **({VARIABLE: contract} if contract else {})}
    given = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
    made = []
    for name, module in (("firecracker", "program"), ("jailer", "jailer")):
        file = directory / name
        run = f'exec env {given} {shlex.quote(os.path.realpath(sys.executable))} -m atoll.testing.firecracker.{module} "$@"'
        file.write_text(f"#!/bin/sh\n{run}\n")
        file.chmod(0o755)
        made.append(file)
    return made[0], made[1]


class FirecrackerStand(QemuStand):
    """Machines by Firecracker."""

    patience_s = 180.0

    def _driver_of(self, config: OciConfig, pool: SlotPool) -> OciDriver:
        if os.environ.get("ATOLL_TEST_KVM") == "1":
            directory, boot_s = Path(os.environ[REAL]), None
            programs = directory / "firecracker", directory / "jailer"
        else:
            # Emulated behind its back, a guest takes its time.
            programs, boot_s = strict_programs(self._home / "firecracker", contract=os.environ.get(VARIABLE)), 180.0
        made = FirecrackerConfig(
            self.machines_cache, boot_s=boot_s, firecracker=programs[0], firecracker_sha256="", jailer=programs[1], jailer_sha256=""
        )
        driver = firecracker_driver(config, pinned(made), pool, on_step=self._on_step)
        if boot_s is not None:
            driver.program.overhead_mib += EMULATION_MIB
            # Two Pythons and a description of a hundred pages come before the strict one answers: on a busy machine that takes its time.
            driver.program.there_s = boot_s
        return driver
