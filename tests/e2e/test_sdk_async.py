"""The asynchronous SDK: the same things, all at once."""

from __future__ import annotations

import asyncio
import time

import pytest
from e2b import AsyncSandbox, CommandExitException, NotFoundException, PtySize, SandboxNotRunningException, SandboxQuery, TimeoutException


@pytest.fixture
async def twin(sandbox):
    """The module's sandbox, seen by the asynchronous SDK."""
    return await AsyncSandbox.connect(sandbox.sandbox_id)


async def test_life(product) -> None:
    sandbox = await AsyncSandbox.create(timeout=120, metadata={"async": "yes"}, envs={"A": "1"})
    assert (await sandbox.commands.run("echo $A")).stdout == "1\n"
    assert await sandbox.is_running()
    info = await sandbox.get_info()
    assert info.metadata == {"async": "yes"}
    await sandbox.set_timeout(300)
    page = await AsyncSandbox.list(query=SandboxQuery(metadata={"async": "yes"})).next_items()
    assert sandbox.sandbox_id in [one.sandbox_id for one in page]
    again = await AsyncSandbox.connect(sandbox.sandbox_id)
    assert (await again.commands.run("cat /run/e2b/.E2B_SANDBOX_ID")).stdout.strip() == sandbox.sandbox_id
    assert await sandbox.kill() is True
    assert await sandbox.kill() is False
    assert not await sandbox.is_running()
    with pytest.raises(NotFoundException):
        await sandbox.get_info()


async def test_as_a_context() -> None:
    async with await AsyncSandbox.create(timeout=60) as sandbox:
        assert (await sandbox.commands.run("echo in")).stdout == "in\n"
    assert not await sandbox.is_running()


async def test_commands_at_once(twin) -> None:
    began = time.monotonic()
    results = await asyncio.gather(*(twin.commands.run(f"sleep 0.5; echo {number}") for number in range(20)))
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(20)]
    assert time.monotonic() - began < 9


async def test_command_forms(twin) -> None:
    seen: list[str] = []
    result = await twin.commands.run("echo a; sleep 0.2; echo b >&2", on_stdout=seen.append, on_stderr=seen.append)
    assert (result.stdout, result.stderr, "".join(seen)) == ("a\n", "b\n", "a\nb\n")
    with pytest.raises(CommandExitException) as failed:
        await twin.commands.run("exit 9")
    assert failed.value.exit_code == 9
    with pytest.raises(TimeoutException):
        await twin.commands.run("sleep 30", timeout=1)
    handle = await twin.commands.run("cat", background=True, stdin=True)
    await handle.send_stdin("typed\n")
    await handle.close_stdin()
    assert (await handle.wait()).stdout == "typed\n"
    sleeper = await twin.commands.run("sleep 60", background=True)
    assert sleeper.pid in [one.pid for one in await twin.commands.list()]
    again = await twin.commands.connect(sleeper.pid)
    assert await sleeper.kill() is True
    with pytest.raises(CommandExitException):
        await again.wait()


async def test_terminal(twin) -> None:
    said: list[bytes] = []
    handle = await twin.pty.create(PtySize(rows=24, cols=80), on_data=said.append)
    await twin.pty.resize(handle.pid, PtySize(rows=40, cols=120))
    await twin.pty.send_stdin(handle.pid, b"stty size; exit\n")
    await handle.wait()
    assert b"40 120" in b"".join(said)


async def test_files(twin, directory) -> None:
    await asyncio.gather(*(twin.files.write(f"{directory}/{number}", f"content {number}") for number in range(10)))
    assert await asyncio.gather(*(twin.files.read(f"{directory}/{number}") for number in range(10))) == [
        f"content {number}" for number in range(10)
    ]
    assert len(await twin.files.list(directory)) == 10

    async def parts():
        for number in range(50):
            yield str(number).encode() * 1000

    await twin.files.write(f"{directory}/streamed", parts())
    read = b""
    async for chunk in await twin.files.read(f"{directory}/streamed", format="stream"):
        read += chunk
    assert read == b"".join(str(number).encode() * 1000 for number in range(50))
    await twin.files.write(f"{directory}/zip", "z" * 100_000, gzip=True)
    assert await twin.files.read(f"{directory}/zip", gzip=True) == "z" * 100_000
    assert await twin.files.make_dir(f"{directory}/d") is True
    assert (await twin.files.rename(f"{directory}/d", f"{directory}/e")).name == "e"
    await twin.files.remove(f"{directory}/e")
    assert not await twin.files.exists(f"{directory}/e")


async def test_many_sandboxes_at_once() -> None:
    made = await asyncio.gather(*(AsyncSandbox.create(timeout=120) for _ in range(4)))
    said = await asyncio.gather(*(one.commands.run("hostname; cat /run/e2b/.E2B_SANDBOX_ID") for one in made))
    assert [result.stdout.splitlines()[-1] for result in said] == [one.sandbox_id for one in made]
    assert all(await asyncio.gather(*(one.kill() for one in made)))


async def test_kill_cuts_what_runs() -> None:
    sandbox = await AsyncSandbox.create(timeout=60)
    running = asyncio.ensure_future(sandbox.commands.run("sleep 100", timeout=0))
    await asyncio.sleep(1)
    await sandbox.kill()
    with pytest.raises(SandboxNotRunningException):
        async with asyncio.timeout(10):
            await running
