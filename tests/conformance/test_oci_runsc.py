"""The oci driver with runsc keeps what the port promises, on this machine."""

import pytest

from atoll.drivers.oci.config import RuntimeKind
from atoll.testing.conformance.suite import CASES, lacking
from conformance.conftest import oci_stand

pytestmark = [pytest.mark.root, pytest.mark.runtime]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_case(case, tmp_path):
    stand = oci_stand(RuntimeKind.RUNSC, tmp_path)
    if flags := lacking(case, stand.driver.capabilities):
        pytest.skip(f"runsc does not declare {', '.join(flags)}")
    await stand.open()
    try:
        await case.run(stand)
    finally:
        await stand.close()
