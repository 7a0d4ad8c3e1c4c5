"""The fake driver keeps what the port promises."""

import pytest

from atoll.testing.conformance.fake_stand import FakeStand
from atoll.testing.conformance.suite import CASES, lacking


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_case(case):
    stand = FakeStand()
    if flags := lacking(case, stand.driver.capabilities):
        pytest.skip(f"fake does not declare {', '.join(flags)}")
    await stand.open()
    try:
        await case.run(stand)
        assert not stand.machine.placements
    finally:
        await stand.close()
