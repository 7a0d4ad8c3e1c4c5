"""The qemu driver keeps what the port promises, on this machine: with KVM where a guest boots with it, else without."""

import pytest

from atoll.drivers.oci.config import RuntimeKind
from atoll.testing.conformance.qemu_stand import QemuStand, missing
from atoll.testing.conformance.suite import CASES, lacking

pytestmark = [pytest.mark.root, pytest.mark.runtime]


@pytest.fixture
async def stand(tmp_path, binaries, cache):
    if lack := missing(binaries, cache):
        pytest.skip(f"needs {lack}")
    made = QemuStand(RuntimeKind.QEMU, tmp_path, binaries=binaries, cache=cache)
    await made.open()
    yield made
    await made.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_case(case, stand):
    if flags := lacking(case, stand.driver.capabilities):
        pytest.skip(f"qemu does not declare {', '.join(flags)}")
    await case.run(stand)
