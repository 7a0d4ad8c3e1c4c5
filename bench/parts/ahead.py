"""Templates whose start command takes a while: sandboxes that go on from where the build has kept it, beside those that begin it anew."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Final

from bench.findings import Finding, Verdict
from bench.stats import Sample, figure, paired
from bench.world import World

BEGINS_S: Final = 3.0
"""What the start command takes by itself until it is of use."""
HELD_MIB: Final = 64
MEMORY_MIB: Final = 512
SERVER: Final = f"""
import http.server, os, time
held = os.urandom({HELD_MIB} << 20)
time.sleep({BEGINS_S})
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
ASK: Final = "curl -fsS -o /dev/null http://127.0.0.1:8000/"


async def measure(world: World) -> Finding:
    """`Sandbox.create()` until the start command's server has answered once, from both."""
    finding = Finding(
        name="ahead",
        title="Start commands, gVisor (s)",
        columns=["", "p50", "p95", "p99", "n"],
        about=(
            f"`Sandbox.create()` of the Python SDK, until a command inside has had an answer from the start command's server, which holds {HELD_MIB} MiB "
            f"and sleeps {BEGINS_S:.0f} s before it serves. Kept: from where the build has kept it, with an environment of its own. Anew: a sandbox of another size "
            "(`POST /v1/sandboxes`, then `Sandbox.connect()`), which begins it. One after the other, in pairs."
        ),
    )
    name = f"ahead-{uuid.uuid4().hex[:8]}"
    kept, anew = Sample(), Sample()
    await asyncio.to_thread(_build, name)
    try:
        for _ in range(world.count(10, 2)):
            kept.add(await asyncio.to_thread(_create, name))
            anew.add(await _anew(world, name))
    finally:
        await world.api.delete_template(name)
    for what, sample in (("kept", kept), ("anew", anew)):
        finding.rows.append([what, *sample.cells(scale=1.0)])
        finding.keep(what, sample)
    saved = -paired(kept.values, anew.values)
    finding.verdicts.append(
        Verdict(
            "a kept start command saves what it takes, less 0.5 s", f"{saved:.2f} s", figure(BEGINS_S - 0.5) + " s", saved >= BEGINS_S - 0.5
        )
    )
    return finding


def _build(name: str) -> None:
    # Imported here: the SDK reads its environment when it is.
    from e2b import Template, wait_for_port

    template = Template().from_template("base").set_start_cmd(f"python3 -c '{SERVER}'", wait_for_port(8000))
    Template.build(template, name, cpu_count=1, memory_mb=MEMORY_MIB)


def _create(name: str) -> float:
    from e2b import Sandbox

    began = time.perf_counter()
    with Sandbox.create(name, envs={"MINE": "1"}, timeout=300) as sandbox:
        sandbox.commands.run(ASK)
        return time.perf_counter() - began


async def _anew(world: World, name: str) -> float:
    began = time.perf_counter()
    made = await world.api.create("default", name, cpu_millis=1000, memory_mib=MEMORY_MIB + 64, disk_mib=2048)
    return await asyncio.to_thread(_ask, made.id, began)


def _ask(sandbox_id: str, began: float) -> float:
    from e2b import Sandbox

    with Sandbox.connect(sandbox_id, timeout=300) as sandbox:
        sandbox.commands.run(ASK)
        return time.perf_counter() - began
