"""`docker run` of the same root, where there is a daemon; otherwise why not."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time

from atoll.images.cache import ImageCache
from atoll.programs.layout import cache_directory
from bench.findings import Finding
from bench.stats import Sample
from bench.world import World


async def measure(world: World) -> Finding:
    """`docker run --rm` of `/bin/true`, with the limits that our sandboxes have."""
    finding = Finding(
        name="docker",
        title="`docker run --rm IMAGE /bin/true` (ms)",
        columns=["", "p50", "p95", "p99", "n"],
        about="The whole command, container removed; the same root as the template `base`, 1 core, 512 MiB.",
    )
    problem = _problem()
    if problem is not None:
        finding.notes.append(f"Not measured: {problem}.")
        return finding
    image = f"atoll-bench-{os.getpid()}"
    await asyncio.to_thread(_import, image)
    try:
        sample = Sample()
        for turn in range(world.count(20, 5) + 1):
            began = time.perf_counter()
            await asyncio.to_thread(_docker, "run", "--rm", "--cpus=1", "--memory=512m", image, "/bin/true")
            if turn:
                sample.add(time.perf_counter() - began)
        finding.rows.append(["docker run", *sample.cells()])
        finding.keep("docker run", sample)
    finally:
        await asyncio.to_thread(_docker, "rmi", "--force", image)
    return finding


def _problem() -> str | None:
    if shutil.which("docker") is None:
        return "there is no docker command on this machine"
    ran = subprocess.run(["docker", "info", "--format", "{{json .ServerVersion}}"], capture_output=True, text=True, timeout=20, check=False)
    if ran.returncode == 0 and json.loads(ran.stdout or '""'):
        return None
    started = "and no dockerd that could be started" if shutil.which("dockerd") is None else "and its daemon does not run"
    return f"there is a docker client {started} ({(ran.stderr or ran.stdout).strip().splitlines()[-1][:120]})"


def _import(image: str) -> None:
    root = ImageCache(cache_directory()).current("base").rootfs
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
        subprocess.run(["docker", "import", "-", image], stdin=tar.stdout, stdout=subprocess.DEVNULL, check=True)


def _docker(*arguments: str) -> None:
    subprocess.run(["docker", *arguments], stdout=subprocess.DEVNULL, check=True)
