"""What an answer says of the machine that a sandbox has: never more than its host has said."""

import pytest

from atoll.control.api.v1.answers import machine
from atoll.domain.spec import Isolation


@pytest.mark.parametrize(
    ("isolation", "said", "shown"),
    [
        (Isolation.VM, "firecracker full", ("firecracker", "virtualized", "full")),
        (Isolation.VM_EMULATED, "qemu-emulated full", ("qemu-emulated", "emulated", "full")),
        (Isolation.SHARED_KERNEL, "oci-crun filesystem", ("oci-crun", None, "filesystem")),
        (Isolation.GVISOR, "scripted", ("scripted", None, None)),
        (Isolation.GVISOR, None, (None, None, None)),
        (Isolation.VM, "", (None, "virtualized", None)),
    ],
)
def test_driver_hardware_and_what_a_suspend_keeps(isolation, said, shown):
    found = machine(isolation, said)
    assert (found["driver"], found["hardware"], found["saves"]) == shown
