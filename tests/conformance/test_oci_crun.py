"""The oci driver with crun keeps what the port promises, on this machine."""

import asyncio
import shutil
from pathlib import Path

import pytest

from atoll.drivers.oci.config import RuntimeKind
from atoll.drivers.oci.crun import Crun
from atoll.hostops import cgroups, loopdisk
from atoll.programs.layout import bin_directory
from atoll.testing.conformance.suite import CASES, lacking

RUNTIME = RuntimeKind.CRUN
pytestmark = [pytest.mark.root, pytest.mark.runtime]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_case(case, oci_stand):
    if flags := lacking(case, oci_stand.driver.capabilities):
        pytest.skip(f"crun does not declare {', '.join(flags)}")
    await case.run(oci_stand)


def test_runc_stands_in_only_for_what_is_missing(tmp_path: Path) -> None:
    """A machine on which crun can start a container uses it: runc takes twice as long."""
    crun, runc = (Path(shutil.which(name) or "") for name in ("crun", "runc"))
    if not crun.name or not runc.name:
        pytest.skip("crun and runc are missing; apt install crun runc")
    for given, stands_in in ((crun, False), (tmp_path / "no-crun", True)):
        runtime = Crun(given, runc, tmp_path / "run", cgroups.detect(), probe=bin_directory() / "atoll-guest")
        runtime.open()
        try:
            assert runtime.is_runc is stands_in
        finally:
            runtime.close()


async def test_what_a_guest_syncs_reaches_the_hosts_disk(oci_stand) -> None:
    """The disk is mounted without barriers, so that a start need not wait for the host's; they are on when the guest can use them."""
    order = oci_stand.order()
    await oci_stand.driver.prepare(order)
    seen = await oci_stand.driver.start(order)
    await oci_stand.guest(order, seen)
    (loop,) = loopdisk.users(oci_stand.config.state_dir / order.placement_id)
    options = Path(f"/proc/fs/ext4/{loop}/options")
    for _ in range(100):
        if "barrier" in options.read_text().splitlines():
            break
        await asyncio.sleep(0.02)
    assert "barrier" in options.read_text().splitlines()
    await oci_stand.driver.remove(order.placement_id)
