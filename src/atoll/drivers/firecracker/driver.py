"""The `firecracker` driver: virtual machines by Firecracker, with KVM. The rest is `drivers/machines`'."""

from __future__ import annotations

from collections.abc import Callable

from atoll.base.errors import AtollError
from atoll.drivers.firecracker.config import FirecrackerConfig
from atoll.drivers.firecracker.machine import Firecracker
from atoll.drivers.machines.driver import MachineDriver
from atoll.drivers.oci.config import OciConfig
from atoll.drivers.oci.driver import no_step
from atoll.drivers.oci.slots import SlotPool
from atoll.drivers.port import Probe
from atoll.hostops import cgroups


class FirecrackerDriver(MachineDriver):
    """Machines by the two programs that the operator has pinned."""

    moments_of = "firecracker"

    def __init__(self, config: OciConfig, machines: FirecrackerConfig, pool: SlotPool, *, on_step: Callable[[str], None] = no_step) -> None:
        self.program = Firecracker(
            machines, state_dir=config.state_dir, run_dir=config.run_dir, guest=config.guest_binary, layout=cgroups.detect()
        )
        super().__init__(config, machines, self.program, pool, on_step=on_step)

    def _probe_program(self) -> Probe:
        name, fix = (
            "runtime.firecracker.binary",
            "put the pinned programs where firecracker.toml says, or name the digests of those that are there",
        )
        try:
            programs = self.program.programs()
        except (AtollError, OSError) as error:
            return Probe(name, ok=False, detail=str(error), fix=fix)
        return Probe(name, ok=True, detail=f"{self.program.binary}: {programs.version}, as pinned", fix=fix)
