"""The stand of the `qemu` driver: as those of the `oci` drivers, with virtual machines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from atoll.drivers.machines.driver import FOUND
from atoll.drivers.oci.config import OciConfig, RuntimeKind
from atoll.drivers.oci.driver import OciDriver
from atoll.drivers.oci.slots import SlotPool
from atoll.drivers.qemu.build import qemu_driver
from atoll.drivers.qemu.config import QemuConfig
from atoll.testing.conformance.oci_stand import OciStand


def missing(binaries: Path, cache: Path) -> str | None:
    """What this machine lacks for the stand, and how to get it; None when nothing."""
    config = QemuConfig(cache)
    if os.geteuid() != 0:
        return "root (run the tests with sudo)"
    if not (binaries / "atoll-guest").exists():
        return f"{binaries / 'atoll-guest'} (make build)"
    if not (cache / "templates" / "base" / "current").exists():
        return f"the base template in {cache} (make up)"
    for path in (config.qemu, config.mkfs, cache / "kernels" / "current"):
        if not path.exists():
            return f"{path} (scripts/setup.py --only machines)"
    return None


def kind(environ: Mapping[str, str] = os.environ) -> RuntimeKind:
    """With ATOLL_TEST_KVM=1 machines have hardware virtualization, else they are emulated: that can be tested anywhere."""
    return RuntimeKind.QEMU if environ.get("ATOLL_TEST_KVM") == "1" else RuntimeKind.QEMU_EMULATED


class QemuStand(OciStand):
    """Machines by QEMU."""

    patience_s = 180.0
    _found: str | None = None
    """What the first stand has found that machines run on: it takes seconds to find out."""

    async def open(self) -> None:
        note = self.config.run_dir / FOUND
        if QemuStand._found is not None:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(QemuStand._found)
        await super().open()
        if note.exists():
            QemuStand._found = note.read_text()

    def _driver_of(self, config: OciConfig, pool: SlotPool) -> OciDriver:
        # Others may keep this machine busy, and what is emulated waits for them.
        boot_s = None if config.runtime is RuntimeKind.QEMU else self.patience_s
        return qemu_driver(config, QemuConfig(self.machines_cache, boot_s=boot_s), pool, on_step=self._on_step)

    @property
    def machines_cache(self) -> Path:
        """The kernel is the machine's own, like the base template."""
        kernels = self._cache / "kernels"
        with contextlib.suppress(FileExistsError):
            kernels.symlink_to(self._given_cache / "kernels")
        return self._cache
