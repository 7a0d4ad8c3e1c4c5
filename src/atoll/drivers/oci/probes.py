"""Self-checks of this driver: pure questions to the machine. The one that boots a guest is the driver's own (`driver.probe`)."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Mapping
from typing import Final

from atoll.domain.spec import SaveMode
from atoll.drivers.oci.config import OciConfig, RuntimeKind
from atoll.drivers.oci.runsc import MAP_COUNT, MAP_COUNT_MIN
from atoll.drivers.oci.runtime import Runtime
from atoll.drivers.port import Probe
from atoll.hostops import cgroups
from atoll.hostops.cgroups import Layout
from atoll.images.cache import ImageCache

NOFILE_MIN: Final = 8192

_NETWORK_FIXES: Final = {
    "net.firewall": "let that chain accept what comes from and goes to this instance's interfaces (at...), or guests reach no public address",
    "net.nft": "the agent writes it again within seconds; find out what on this host removes it (firewalld, a script with `nft flush ruleset`)",
    "net.gateway": "restart the agent: it makes the device again",
    "net.forwarding": "sysctl net.ipv4.ip_forward=1, and see what sets it to 0",
    "net.slots": "the detail names the kernel's answer; veth and nftables must be available",
}


def binary(kind: RuntimeKind, runtime: Runtime) -> Probe:
    """The runtime is there and says its version."""
    name = f"runtime.{kind}.binary"
    try:
        done = subprocess.run([str(runtime.binary), "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        fix = "make up builds it" if kind is RuntimeKind.RUNSC else "apt-get install crun (or runc)"
        return Probe(name, ok=False, detail=f"{runtime.binary} cannot be run: {error}", fix=fix)
    return Probe(
        name, ok=done.returncode == 0, detail=f"{runtime.binary}: {(done.stdout or done.stderr).splitlines()[0]}", fix="reinstall it"
    )


def rest(config: OciConfig, layout: Layout, runtime: Runtime) -> Probe:
    """What can be done to a guest's time here: said, so that nobody is surprised by what a suspend keeps."""
    freezes = cgroups.freezes(layout)
    saves = "memory and files" if runtime.saves is SaveMode.FULL else "files alone: it boots anew"
    detail = f"{'pauses in place; ' if freezes else 'no freezer for control groups, so nothing is paused; '}a suspend saves {saves}"
    return Probe(f"runtime.{config.runtime}.rest", ok=freezes, detail=detail, fix="mount the freezer controller (cgroup v1)", fatal=False)


def guest(config: OciConfig) -> Probe:
    """The program that runs inside is there."""
    ok = os.access(config.guest_binary, os.X_OK)
    return Probe("guest.binary", ok=ok, detail=str(config.guest_binary), fix="make up builds it")


def controllers(layout: Layout) -> Probe:
    """Memory, processes and CPU can be limited."""
    missing = layout.missing()
    where = f"cgroup v{layout.version}"
    detail = f"{where} lacks {', '.join(missing)}" if missing else f"{where} has memory, pids and cpu"
    return Probe("cgroup.controllers", ok=not missing, detail=detail, fix="boot with cgroup_enable=memory, or mount the controllers")


def network(found: Mapping[str, str | None]) -> list[Probe]:
    """What the slot pool found."""
    return [
        Probe(name, ok=problem is None, detail=problem or "in order", fix=_NETWORK_FIXES[name], fatal=name != "net.firewall")
        for name, problem in found.items()
    ]


def disk(config: OciConfig) -> Probe:
    """There is room for new sandboxes."""
    space = os.statvfs(config.state_dir)
    free_mib = space.f_bavail * space.f_frsize >> 20
    detail = f"{free_mib} MiB free in {config.state_dir}, {config.disk_spare_mib} are kept spare"
    return Probe("disk.space", ok=free_mib >= config.disk_spare_mib, detail=detail, fix="free space on this disk")


def images(cache: ImageCache) -> Probe:
    """There is an image, and none is broken. Not fatal: others still work, and control knows which a host has."""
    problems = cache.problems()
    names = sorted({image.name for image in cache.all()})
    detail = "; ".join(problems) or (f"ready: {', '.join(names)}" if names else "there is no template")
    return Probe("image.cache", ok=bool(names) and not problems, detail=detail, fix="make up builds the base template again", fatal=False)


def limits() -> list[Probe]:
    """Limits of this process and of the kernel that guests run into."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    unlimited = hard == resource.RLIM_INFINITY
    maps = int(MAP_COUNT.read_text())
    return [
        Probe(
            "limits.nofile",
            ok=unlimited or hard >= NOFILE_MIN,
            detail=f"up to {'any number of' if unlimited else hard} open files",
            fix=f"raise the agent's hard limit of open files (LimitNOFILE) to {NOFILE_MIN} or more",
            fatal=False,
        ),
        Probe(
            "limits.map_count",
            ok=maps >= MAP_COUNT_MIN,
            detail=f"vm.max_map_count is {maps}",
            fix=f"sysctl vm.max_map_count={MAP_COUNT_MIN}: a guest process with more mappings ends its sandbox",
            fatal=False,
        ),
    ]
