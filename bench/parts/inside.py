"""What the edge adds to a call into a sandbox: commands, small files, streams. In turn through the edge and straight to the guest."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import urlsplit

from atoll.client import connect
from atoll.drivers.oci.config import RuntimeKind
from bench.clients import LOGIN_TRUE, TRUE, Inside
from bench.findings import Finding, Verdict
from bench.product import CannotMeasure
from bench.stats import Sample, figure, paired
from bench.world import CLASS, SIZE, World

OVERHEAD_MS: Final = 2.0
SHARE_WANTED: Final = 0.7
SMALL: Final = b"x" * 1024
SMALL_PATH: Final = "/root/small"
BULK_PATH: Final = "/root/bulk"
BULK_MIB: Final = 128
PIPE_BYTES: Final = 1 << 20


async def calls(world: World, kind: RuntimeKind) -> Finding:
    """Short calls, one at a time over kept connections."""
    finding = Finding(
        name=f"calls-{kind}",
        title=f"Calls into a sandbox, {kind} (ms)",
        columns=["", "edge p50", "p95", "p99", "direct p50", "p95", "edge adds", "n"],
        about=(
            "The same request over a kept connection, in turn through the edge and straight to the guest's address. "
            "`edge adds` is the median of the differences, pair by pair."
        ),
    )
    made = await world.api.create(CLASS[kind], **SIZE)
    try:
        ways = (world.api.through_edge(made), await world.api.direct(made))
        await ways[1].write(SMALL_PATH, SMALL)
        work: list[tuple[str, Callable[[Inside], Awaitable[object]], bool]] = [
            ("start `/bin/true`, to its end", lambda way: way.run(TRUE), True),
            ("start `bash -l -c true` (the SDK's `run`)", lambda way: way.run(LOGIN_TRUE, user="user"), False),
            ("write 1 KiB", lambda way: way.write(SMALL_PATH, SMALL), True),
            ("read 1 KiB", lambda way: way.read(SMALL_PATH), True),
        ]
        for label, call, has_target in work:
            edge, direct = await _in_turn(ways, call, world.count(300, 60))
            extra = paired(edge.values, direct.values) * 1e3
            finding.rows.append([label, *edge.cells()[:3], *direct.cells()[:2], f"{extra:+.2f}", str(len(edge))])
            finding.keep(f"{label}, edge", edge)
            finding.keep(f"{label}, direct", direct)
            if has_target:
                target = f"{label}, {kind}: the edge adds at most {OVERHEAD_MS:g} ms (p50)"
                finding.verdicts.append(Verdict(target, f"{extra:+.2f} ms", f"+{OVERHEAD_MS:g} ms", extra <= OVERHEAD_MS))
    finally:
        await world.api.end(made.id)
    if kind is RuntimeKind.CRUN:
        finding.notes.append(_bare_process(world.count(300, 60)))
    return finding


async def _in_turn(ways: tuple[Inside, Inside], call: Callable[[Inside], Awaitable[object]], count: int) -> tuple[Sample, Sample]:
    samples = (Sample(), Sample())
    for way in ways:
        for _ in range(5):
            await call(way)
    for turn in range(count):
        for index in (0, 1) if turn % 2 == 0 else (1, 0):
            began = time.perf_counter()
            await call(ways[index])
            samples[index].add(time.perf_counter() - began)
    return samples


def _bare_process(count: int) -> str:
    """The same work without any sandbox, by this benchmark's own process."""
    spawned, written, path = Sample(), Sample(), f"/var/tmp/atoll-bench-{os.getpid()}"
    for _ in range(count):
        began = time.perf_counter()
        subprocess.run(["/bin/true"], check=True)
        spawned.add(time.perf_counter() - began)
    try:
        for _ in range(count):
            began = time.perf_counter()
            with open(path, "wb") as file:  # noqa: PTH123 - as near to the system call as may be
                file.write(SMALL)
            written.add(time.perf_counter() - began)
    finally:
        os.unlink(path)  # noqa: PTH108
    return (
        f"A bare process on the host, for comparison: `/bin/true` {figure(spawned.median * 1e3)} ms, "
        f"1 KiB written {figure(written.median * 1e3)} ms (p50, n={count})."
    )


async def streams(world: World, kind: RuntimeKind) -> Finding:
    """Bulk, one stream, by blocking sockets in a thread: the client must not be what is measured."""
    finding = Finding(
        name=f"streams-{kind}",
        title=f"Streams, {kind} (MB/s)",
        columns=["", "edge p50", "direct p50", "edge / direct", "n"],
        about=(
            f"{BULK_MIB} MiB in one stream over a new connection each, in turn. Standard output counts the command's bytes, which "
            "travel as Connect messages (JSON, base64)."
        ),
    )
    made = await world.api.create(CLASS[kind], **{**SIZE, "memory_mib": 1024})
    try:
        ways = (world.api.through_edge(made), await world.api.direct(made))
        await ways[1].run(("/bin/sh", "-c", f"head -c {BULK_MIB << 20} /dev/zero > {BULK_PATH}"))
        for label, stream in (("standard output", _stdout), ("upload", _upload), ("download", _download)):
            rates = (Sample(), Sample())
            for turn in range(world.count(7, 2) + 1):
                for index in (0, 1) if turn % 2 == 0 else (1, 0):
                    seconds = await asyncio.to_thread(stream, ways[index])
                    if turn:
                        rates[index].add((BULK_MIB << 20) / 1e6 / seconds)
            share = rates[0].median / rates[1].median
            finding.rows.append([label, figure(rates[0].median), figure(rates[1].median), f"{share * 100:.0f} %", str(len(rates[0]))])
            finding.keep(f"{label}, edge", rates[0])
            finding.keep(f"{label}, direct", rates[1])
            target = f"{label}, {kind}: at least {SHARE_WANTED * 100:.0f} % of a direct connection"
            finding.verdicts.append(Verdict(target, f"{share * 100:.0f} %", f"{SHARE_WANTED * 100:.0f} %", share >= SHARE_WANTED))
    finally:
        await world.api.end(made.id)
    if kind is RuntimeKind.CRUN:
        finding.notes.append(f"A bare pipe on the host, for comparison: {figure(_bare_pipe())} MB/s.")
    return finding


def _stdout(way: Inside) -> float:
    command = {"process": {"cmd": "/usr/bin/head", "args": ["-c", str(BULK_MIB << 20), "/dev/zero"]}, "stdin": False}
    headers = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
    seconds, received = _exchange(way, "POST", "/process.Process/Start", connect.encode(command), headers)
    if received < (BULK_MIB << 20) * 4 // 3:
        raise CannotMeasure(f"only {received} bytes of output came")
    return seconds


def _upload(way: Inside) -> float:
    headers = {"Content-Type": "application/octet-stream"}
    return _exchange(way, "POST", f"/files?path={BULK_PATH}", memoryview(bytes(BULK_MIB << 20)), headers)[0]


def _download(way: Inside) -> float:
    seconds, received = _exchange(way, "GET", f"/files?path={BULK_PATH}", b"", {})
    if received < BULK_MIB << 20:
        raise CannotMeasure(f"only {received} bytes of the file came")
    return seconds


def _exchange(way: Inside, method: str, path: str, body: bytes | memoryview, headers: dict[str, str]) -> tuple[float, int]:
    """One request on a connection of its own, read to the end: seconds, and bytes received."""
    address = urlsplit(way.url)
    lines = {"Host": address.netloc, "Connection": "close", "Content-Length": str(len(body)), **way.headers, **headers}
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
    buffer = bytearray(PIPE_BYTES)
    began = time.perf_counter()
    with socket.create_connection((address.hostname or "", address.port or 80), timeout=120) as link:
        link.sendall(head.encode())
        link.sendall(body)
        received = link.recv_into(buffer)
        first = bytes(buffer[:15])
        total = received
        while received:
            received = link.recv_into(buffer)
            total += received
    if not first.startswith(b"HTTP/1.1 200"):
        raise CannotMeasure(f"{method} {path} was answered {first!r}")
    return time.perf_counter() - began, total


def _bare_pipe() -> float:
    """`head` of zeros through a pipe, read here."""
    began = time.perf_counter()
    with subprocess.Popen(["head", "-c", str(BULK_MIB << 20), "/dev/zero"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while process.stdout.read(PIPE_BYTES):
            pass
    return (BULK_MIB << 20) / 1e6 / (time.perf_counter() - began)
