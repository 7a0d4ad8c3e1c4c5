"""runc stands in where crun is missing or refuses: what differs between the two is tried again with it."""

from dataclasses import replace
from pathlib import Path

import pytest

from atoll.drivers.oci.config import RuntimeKind
from atoll.testing.conformance.oci_stand import OciStand, missing
from atoll.testing.conformance.suite import CASES

pytestmark = [pytest.mark.root, pytest.mark.runtime]
DIFFERENT = {
    "start_says_where_and_can_be_repeated",
    "stop_keeps_files_and_start_goes_on",
    "a_running_guest_survives_its_driver",
    "a_fork_bomb_stays_inside",
    "memory_is_what_was_ordered",
    "the_hosts_kernel_is_out_of_reach",
    "self_checks_pass_and_say_what_to_do",
}


@pytest.fixture(params=["missing", "refuses"])
async def stand(request, tmp_path, binaries, cache):
    if lack := missing(RuntimeKind.CRUN, binaries, cache):
        pytest.skip(f"needs {lack}")
    made = OciStand(RuntimeKind.CRUN, tmp_path, binaries=binaries, cache=cache)
    if not made.config.runc.exists():
        pytest.skip("needs runc (apt-get install runc)")
    made.config = replace(made.config, crun=Path("/nowhere/crun") if request.param == "missing" else Path("/bin/false"))
    made.rebuild()
    await made.open()
    yield made
    await made.close()


@pytest.mark.parametrize("case", [case for case in CASES if case.name in DIFFERENT], ids=lambda case: case.name)
async def test_case(case, stand):
    if case.name == "self_checks_pass_and_say_what_to_do":
        (probe,) = [probe for probe in await stand.driver.probe() if probe.id == "runtime.crun.binary"]
        assert "runc" in probe.detail
    await case.run(stand)
