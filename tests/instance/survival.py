"""What the survival tests share: a public client of one instance, and what the machine itself says about its sandboxes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
from e2b import Sandbox

from atoll.drivers.oci.moving import INBOX
from atoll.drivers.oci.programs import PROGRAMS as COPIES
from atoll.drivers.oci.saves import SNAPSHOTS
from atoll.hostops import processes
from atoll.programs import identity

if TYPE_CHECKING:
    from tests.instance.conftest import Instance

PROGRAMS = ("control", "agent", "edge", "supervisor")
CGROUPS = Path("/sys/fs/cgroup")


def kill(instance: Instance, *names: str, number: int = signal.SIGKILL) -> list[int]:
    """Send a signal to these programs; the pids that got it."""
    hit: list[int] = []
    for name in names:
        running = identity.living(instance.layout.pid_file(name))
        if running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, number)
                hit.append(running.pid)
    return hit


def carrying(instance: Instance, what: str, begun: Callable[[], object]) -> int:
    """The agent's program that fetches or unpacks an image, stopped once it has begun; its pid."""
    agent, deadline = instance.pid("agent"), time.monotonic() + 60
    assert agent is not None
    while not begun():
        assert time.monotonic() < deadline, f"no {what} has begun"
        time.sleep(0.002)
    (pid,) = [pid for pid in processes.children(agent) if f"\0image\0{what}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(pid, signal.SIGSTOP)
    assert begun(), "it was through before it was stopped"
    return pid


class Client:
    """An instance seen from outside: the SDK with this instance's key, and `/v1` for what E2B has no word for."""

    def __init__(self, instance: Instance) -> None:
        values = instance.json("env", "--json")
        self.url = values["E2B_API_URL"]
        self.options: dict[str, Any] = {
            "api_key": values["E2B_API_KEY"],
            "api_url": values["E2B_API_URL"],
            "sandbox_url": values["E2B_SANDBOX_URL"],
            "domain": values["E2B_DOMAIN"],
        }
        self.http = httpx.Client(base_url=self.url, headers={"X-API-KEY": values["E2B_API_KEY"]}, timeout=70)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def create(self, class_name: str = "default", *, timeout: int = 600, **options: Any) -> Sandbox:
        """A sandbox by the SDK; of a class that E2B's API cannot name, by `/v1` and `connect`."""
        if class_name == "default":
            return Sandbox.create(timeout=timeout, request_timeout=70, **options, **self.options)
        answer = self.http.post("/v1/sandboxes", json={"class": class_name, "timeoutSeconds": timeout, **options})
        answer.raise_for_status()
        return self.connect(answer.json()["id"], timeout=timeout)

    def connect(self, sandbox_id: str, *, timeout: int = 600) -> Sandbox:
        return Sandbox.connect(sandbox_id, timeout=timeout, **self.options)

    def kill(self, sandbox_id: str) -> bool:
        return Sandbox.kill(sandbox_id, **self.options)

    def get(self, sandbox_id: str) -> dict[str, Any]:
        """Our own view of it, ended ones too."""
        answer = self.http.get(f"/v1/sandboxes/{sandbox_id}")
        answer.raise_for_status()
        return answer.json()

    def state(self, sandbox_id: str) -> str:
        return str(self.get(sandbox_id)["state"])

    def living(self) -> dict[str, dict[str, Any]]:
        """Every sandbox that has not ended, whatever state it is in."""
        found: dict[str, dict[str, Any]] = {}
        cursor: str | None = None
        while True:
            answer = self.http.get("/v1/sandboxes", params={"limit": 100, **({"cursor": cursor} if cursor else {})})
            answer.raise_for_status()
            body = answer.json()
            found |= {str(one["id"]): one for one in body["items"] if one["state"] not in {"released", "failed"}}
            cursor = body.get("nextCursor")
            if not cursor:
                return found

    def host(self) -> dict[str, Any]:
        answer = self.http.get("/v1/hosts")
        answer.raise_for_status()
        (host,) = answer.json()["items"]
        return dict(host)


@dataclass
class Machine:
    """What the machine has of an instance's placements, by placement id; and what it has that belongs to none."""

    placements: dict[str, Counter[str]] = field(default_factory=dict)
    sandboxes: dict[str, str] = field(default_factory=dict)
    """placement id → sandbox id, by the records on the disk."""
    guests: dict[str, set[int]] = field(default_factory=dict)
    """placement id → processes that are a guest's outermost one: `runsc-sandbox`, or PID 1 of a container."""
    pids: dict[str, set[int]] = field(default_factory=dict)
    orphans: list[str] = field(default_factory=list)

    def add(self, placement: str, what: str) -> None:
        self.placements.setdefault(placement, Counter())[what] += 1


def look(instance: Instance) -> Machine:
    """Look at directories, control groups, processes, interfaces, mounts, loop devices, runtime files and set elements."""
    found = Machine()
    install = install_of(instance)
    _directories(instance, found)
    _groups(install, found)
    _processes(instance, found)
    addresses = _links(install, found)
    _elements(install, addresses, found)
    _mounts(instance, found)
    for runtime in ("runsc", "crun", "runc"):
        for _, directories, files in os.walk(instance.layout.run / "oci" / runtime):
            for name in {*directories, *files}:
                if "plc_" in name:
                    found.add(_placement(name), "runtime state")
    return found


def install_of(instance: Instance) -> str:
    line = next(line for line in instance.layout.config.read_text().splitlines() if line.startswith("install_id"))
    return line.partition("=")[2].strip().strip('"').removeprefix("ins_")


def _placement(text: str) -> str:
    match = re.search(r"plc_[a-z0-9]{20}", text)
    return match[0] if match else text


def _directories(instance: Instance, found: Machine) -> None:
    for path in instance.layout.sandboxes.iterdir():
        # What is kept of guests, and the programs that they run, lies beside all placements, and belongs to none.
        if path.is_dir() and path.name not in (SNAPSHOTS, INBOX, COPIES):
            found.add(path.name, "directory")
            with contextlib.suppress(OSError, ValueError):
                found.sandboxes[path.name] = json.loads((path / "placement.json").read_text())["sandbox_id"]


def _groups(install: str, found: Machine) -> None:
    for parent in CGROUPS.glob(f"*/atoll-{install[:8]}"):
        for group in parent.iterdir():
            if group.is_dir():
                found.add(group.name, "cgroup")
                for path, _, _ in os.walk(group):
                    with contextlib.suppress(OSError):
                        pids = {int(pid) for pid in (Path(path) / "cgroup.procs").read_text().split()}
                        found.pids.setdefault(group.name, set()).update(pids)


def _processes(instance: Instance, found: Machine) -> None:
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        mentioned = re.search(rf"{re.escape(str(instance.home))}\S*(plc_[a-z0-9]{{20}})", words)
        if mentioned:
            found.pids.setdefault(mentioned[1], set()).add(int(process.name))
    for placement, pids in found.pids.items():
        for pid in pids:
            found.add(placement, "process")
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                inner = re.search(r"^NSpid:\t(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
                container_init = words.startswith(b"/.atoll/guest") and inner is not None and inner[1].split()[-1] == "1"
                if words.startswith(b"runsc-sandbox") or container_init:
                    found.guests.setdefault(placement, set()).add(pid)


def _links(install: str, found: Machine) -> set[str]:
    """Interfaces by their alias; the names of all slots' interfaces that exist."""
    said = json.loads(subprocess.run(["ip", "-j", "-details", "link"], capture_output=True, text=True, check=True).stdout)
    names: set[str] = set()
    for link in said:
        if link["ifname"].startswith(f"at{install[:6]}") and not link["ifname"].endswith("GW"):
            names.add(link["ifname"])
            if link.get("ifalias"):
                found.add(link["ifalias"], "interface")
    return names


def _elements(install: str, links: set[str], found: Machine) -> None:
    listed = subprocess.run(["nft", "-j", "list", "table", "inet", f"atoll_{install[:8]}"], capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        return
    sets = {one["set"]["name"]: one["set"].get("elem", []) for one in json.loads(listed.stdout)["nftables"] if "set" in one}
    living: set[str] = set()
    for element in sets.get("slots", []):
        name, address = element["concat"]
        living.add(address)
        if name not in links:
            found.orphans.append(f"element {name} . {address} of an interface that is gone")
    for name in ("open4", "allow4", "deny4"):
        for element in sets.get(name, []):
            address = element["concat"][0] if isinstance(element, dict) and "concat" in element else element
            if address not in living:
                found.orphans.append(f"element {address} of {name} without a slot")


def _mounts(instance: Instance, found: Machine) -> None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        if str(instance.layout.sandboxes) in line:
            found.add(_placement(line), "mount")
    loops = subprocess.run(["losetup", "--list", "--noheadings", "--output", "BACK-FILE"], capture_output=True, text=True, check=True)
    for line in loops.stdout.splitlines():
        if str(instance.layout.sandboxes) in line:
            found.add(_placement(line), "loop device")


def problems(instance: Instance, client: Client) -> list[str]:
    """What of the machine and of control's records does not agree, once nothing is under way. Empty is right."""
    machine, living = look(instance), client.living()
    said = [f"{one['id']} is {one['state']}" for one in living.values() if one["state"] != "ready"]
    placed = {one["placement"]["id"]: name for name, one in living.items() if one["placement"]}
    said += [f"{name} has no guest" for placement, name in placed.items() if placement not in machine.guests]
    said += [f"{placement}: {len(pids)} guests {sorted(pids)}" for placement, pids in machine.guests.items() if len(pids) != 1]
    said += [f"left of {placement}: {dict(what)}" for placement, what in machine.placements.items() if placement not in placed]
    said += machine.orphans
    used = client.host()["used"]
    if used["slots"] != len(living):
        said.append(f"the host counts {used} for {len(living)} sandboxes")
    return said
