"""The `qemu` drivers: virtual machines by QEMU, with KVM or (another driver, of another isolation) emulated. The rest is `drivers/machines`'."""

from __future__ import annotations

from collections.abc import Callable

from atoll.drivers.machines.config import Accelerator
from atoll.drivers.machines.driver import MachineDriver
from atoll.drivers.oci import probes
from atoll.drivers.oci.config import OciConfig, RuntimeKind
from atoll.drivers.oci.driver import no_step
from atoll.drivers.oci.slots import SlotPool
from atoll.drivers.port import Probe
from atoll.drivers.qemu.config import QemuConfig
from atoll.drivers.qemu.machine import Machines
from atoll.hostops import cgroups


class QemuDriver(MachineDriver):
    """What machines run on follows from the configuration's kind: QEMU has KVM, QEMU_EMULATED has none."""

    moments_of = "qemu"

    def __init__(self, config: OciConfig, machines: QemuConfig, pool: SlotPool, *, on_step: Callable[[str], None] = no_step) -> None:
        accelerator = Accelerator.TCG if config.runtime is RuntimeKind.QEMU_EMULATED else Accelerator.KVM
        runtime = Machines(
            machines,
            accelerator,
            state_dir=config.state_dir,
            run_dir=config.run_dir,
            guest=config.guest_binary,
            layout=cgroups.detect(),
        )
        super().__init__(config, machines, runtime, pool, on_step=on_step)

    def _probe_program(self) -> Probe:
        return probes.binary(self._config.runtime, self._runtime)
