"""The oci driver with crun keeps what the port promises, on this machine."""

import pytest

from atoll.drivers.oci.config import RuntimeKind
from atoll.testing.conformance.suite import CASES, lacking

RUNTIME = RuntimeKind.CRUN
pytestmark = [pytest.mark.root, pytest.mark.runtime]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_case(case, oci_stand):
    if flags := lacking(case, oci_stand.driver.capabilities):
        pytest.skip(f"crun does not declare {', '.join(flags)}")
    await case.run(oci_stand)
