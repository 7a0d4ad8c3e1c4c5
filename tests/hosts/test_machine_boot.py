"""A guest boots on a machine that joined, by the kernel and the first file system that control has published and signed, and by nothing else."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.images import machine_files
from atoll.programs.layout import cache_directory
from atoll.testing.conformance.qemu_stand import missing
from tests.hosts.guests import BINARIES, INSIDE
from tests.hosts.rig import Machine, Rig, opened, until
from tests.hosts.test_machine_files import _foreign, document, publish

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
CLASSES = "version: 1\nclasses:\n  default: {isolation: gvisor}\n  machine: {isolation: vm-emulated}\n"


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """Two machines that joined and have no kernel of their own: the rig's cache has none."""
    if lack := missing(BINARIES, cache_directory()):
        pytest.skip(f"needs {lack}")
    with opened(replicas=1, machines=2, driver="oci") as rig:
        assert not (rig.path / "cache" / "kernels").exists()
        publish(rig, cache_directory())
        rig.call("PUT", "/v1/config", document=CLASSES, revision=0)
        for machine in rig.machines:
            machine.join(rig.operator_token(machine.name))
            allow(machine)
            machine.start_agent()
        yield rig


def allow(machine: Machine) -> None:
    """As its operator does."""
    config = machine.home / "host.toml"
    text = config.read_text()
    assert 'machines = "off"' in text
    config.write_text(text.replace('machines = "off"', 'machines = "emulated"'))


def offers(rig: Rig, machine: Machine) -> bool:
    return "vm-emulated" in rig.hosts()[machine.name]["isolations"]


def told(rig: Rig, machine: Machine, script: str, sandbox: dict[str, str]) -> str:
    placement = rig.get(sandbox["id"])["placement"]["id"]
    address = json.loads((machine.home / "sandboxes" / placement / "placement.json").read_text())["address"]
    return machine.inside(sys.executable, "-c", INSIDE, address, sandbox["accessToken"], "user", script).stdout


def jailed(machine: Machine, placement: str, name: str) -> str:
    """SHA-256 of a file as the program of this placement's machine has it."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"qemu-system-x86_64") and placement.encode() in words:
            return hashlib.sha256((process / "root" / name).read_bytes()).hexdigest()
    raise AssertionError(f"{machine.name} has no program for {placement}")


def test_a_guest_boots_on_each_machine_by_what_was_published(rig: Rig) -> None:
    until(lambda: all(offers(rig, machine) for machine in rig.machines), within_s=400, what=rig.last_words)
    published = machine_files.read(document(rig).read_bytes())
    signed = {one.name: one.digest.removeprefix("sha256:") for one in published.files}
    for machine in rig.machines:
        made = rig.call("POST", "/v1/sandboxes", **{"class": "machine", "timeoutSeconds": 900, "requireHost": machine.name})
        try:
            placement = rig.get(made["id"])["placement"]["id"]
            assert jailed(machine, placement, "initrd") == signed["initrd"]
            assert jailed(machine, placement, "kernel") in (signed["vmlinuz"], signed.get("vmlinux"))
            said = told(rig, machine, "uname -r; cat /proc/cmdline; echo there >/home/user/kept; cat /home/user/kept", made)
            assert said.splitlines()[0] == published.version
            assert said.splitlines()[-1] == "there"
            kept = machine.home / "agent" / "machine"
            assert list(kept.rglob("vmlinuz")), "it was fetched to where what is believed is"
        finally:
            rig.call("DELETE", f"/v1/sandboxes/{made['id']}")
            until(lambda made=made: rig.get(made["id"])["state"] == "released", within_s=60, what=rig.last_words)  # type: ignore[misc]


def test_where_nobody_has_signed_what_is_given_no_guest_boots(rig: Rig) -> None:
    """A machine that has nothing yet offers no machines, says why, and offers them once that is mended."""
    _, machine = rig.machines
    until(lambda: offers(rig, machine), within_s=400, what=rig.last_words)
    machine.kill_agent()
    machine.inside("rm", "-rf", str(machine.home / "agent" / "machine"))
    mend = _foreign(rig)
    try:
        machine.start_agent()
        until((machine.home / "agent" / "machine" / "refused").exists, within_s=120, what=rig.last_words)
        assert "IMAGE_UNTRUSTED" in (machine.home / "agent" / "machine" / "refused").read_text()
        until(lambda: not offers(rig, machine), within_s=120, what=rig.last_words)
        made = rig.call("POST", "/v1/sandboxes", **{"class": "machine", "requireHost": machine.name, "wait": False})
        assert rig.get(made["id"])["placement"] is None
        rig.call("DELETE", f"/v1/sandboxes/{made['id']}")
    finally:
        mend()
    machine.kill_agent()
    machine.start_agent()
    until(lambda: offers(rig, machine), within_s=400, what=rig.last_words)
