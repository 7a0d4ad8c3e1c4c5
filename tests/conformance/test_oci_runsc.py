"""The oci driver with runsc keeps what the port promises, on this machine."""

import pytest

from atoll.drivers.oci.config import RuntimeKind
from atoll.testing.conformance.suite import CASES, lacking

RUNTIME = RuntimeKind.RUNSC
pytestmark = [pytest.mark.root, pytest.mark.runtime]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_case(case, oci_stand):
    if flags := lacking(case, oci_stand.driver.capabilities):
        pytest.skip(f"runsc does not declare {', '.join(flags)}")
    await case.run(oci_stand)
