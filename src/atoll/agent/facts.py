"""Facts: what kind of host this is. Reading is apart from parsing, so that the parsing can be tested anywhere."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

from atoll.wire.agent import HostFacts


def read_facts(state_directory: Path) -> HostFacts:
    """This host's facts; the disk is the one of the state directory."""
    return HostFacts(
        arch=platform.machine(),
        kernel=os.uname().release,
        cpu_count=len(os.sched_getaffinity(0)) or 1,
        memory_mib=max(1, memory_mib(Path("/proc/meminfo").read_text())),
        disk_mib=max(1, shutil.disk_usage(state_directory).total // 2**20),
        boot_id=read_boot_id(),
        claims=True,
    )


def read_boot_id() -> str:
    """The kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def memory_mib(meminfo: str) -> int:
    """MemTotal of /proc/meminfo, in MiB; 0 when it is not there."""
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        if name == "MemTotal":
            words = rest.split()
            return int(words[0]) // 1024 if words and words[0].isdigit() else 0
    return 0


def free_mib(directory: Path) -> int:
    """What is free for ordinary use on the directory's file system, in MiB."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize // 2**20
