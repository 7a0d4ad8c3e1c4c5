"""Run by the oldest Python SDK that we promise: a life, commands, a terminal, files, watching."""

from __future__ import annotations

import time

import httpx
from e2b import CommandExitException, FilesystemEventType, NotFoundException, PtySize, Sandbox, SandboxQuery


def life() -> None:
    sandbox = Sandbox.create(timeout=120, metadata={"old": "a&b=c d"}, envs={"A": "1"})
    assert sandbox.commands.run("echo $A").stdout == "1\n"
    assert sandbox.is_running()
    assert sandbox.get_info().metadata == {"old": "a&b=c d"}
    sandbox.set_timeout(300)
    again = Sandbox.connect(sandbox.sandbox_id, timeout=10)
    assert again.commands.run("echo $E2B_SANDBOX_ID").stdout.strip() == sandbox.sandbox_id
    found = Sandbox.list(query=SandboxQuery(metadata={"old": "a&b=c d"})).next_items()
    assert sandbox.sandbox_id in [one.sandbox_id for one in found]
    commands(sandbox)
    terminal(sandbox)
    files(sandbox)
    assert sandbox.kill() is True
    assert sandbox.kill() is False
    assert not sandbox.is_running()
    try:
        sandbox.get_info()
    except NotFoundException:
        pass
    else:
        raise AssertionError("found after it was killed")


def commands(sandbox: Sandbox) -> None:
    told = None
    try:
        sandbox.commands.run("echo before; exit 3")
    except CommandExitException as failure:
        told = (failure.exit_code, failure.stdout)
    assert told == (3, "before\n")
    handle = sandbox.commands.run("cat", background=True, stdin=True)
    sandbox.commands.send_stdin(handle.pid, "typed\n")
    time.sleep(0.5)
    assert handle.pid in [one.pid for one in sandbox.commands.list()]
    assert handle.kill()
    assert sandbox.commands.run("whoami", user="root").stdout == "root\n"


def terminal(sandbox: Sandbox) -> None:
    said: list[bytes] = []
    handle = sandbox.pty.create(PtySize(rows=24, cols=80))
    sandbox.pty.resize(handle.pid, PtySize(rows=40, cols=120))
    sandbox.pty.send_stdin(handle.pid, b"stty size; exit\n")
    handle.wait(on_pty=said.append)
    assert b"40 120" in b"".join(said)


def files(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("/tmp/old")
    watch = sandbox.files.watch_dir("/tmp/old", recursive=True)
    info = sandbox.files.write("/tmp/old/file.txt", "content")
    assert info.path == "/tmp/old/file.txt"
    assert sandbox.files.read("/tmp/old/file.txt") == "content"
    assert bytes(sandbox.files.read("/tmp/old/file.txt", format="bytes")) == b"content"
    assert [one.name for one in sandbox.files.list("/tmp/old")] == ["file.txt"]
    time.sleep(0.5)
    assert FilesystemEventType.WRITE in [event.type for event in watch.get_new_events()]
    watch.stop()
    assert httpx.get(sandbox.download_url("/tmp/old/file.txt"), timeout=20).text == "content"
    sandbox.files.rename("/tmp/old/file.txt", "/tmp/old/other.txt")
    assert sandbox.files.exists("/tmp/old/other.txt")
    sandbox.files.remove("/tmp/old")
    assert not sandbox.files.exists("/tmp/old")


life()
