"""Memory that outlasts its process for a moment, with real processes."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.hostops import memfiles, processes
from atoll.hostops.memfiles import Held, MemoryFiles

MIB = 1 << 20
SCRIPT = """
import mmap, os, sys
file = os.memfd_create("guest")
os.dup(file)
os.ftruncate(file, {size})
memory = mmap.mmap(file, {size})
for page in range(0, {size}, 4096):
    memory[page] = 1
print("there", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def process_with(size: int) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT.format(size=size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"there\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def open_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_what_is_held_outlasts_its_process_until_it_is_let_go():
    before, memory = open_files(), MemoryFiles(64 * MIB)
    with process_with(8 * MIB) as pid:
        held = memory.hold(pid)
        assert held.size_bytes == 8 * MIB, "each file once, however many descriptors the process has of it"
        assert len(held.fds) == 1
    assert not processes.alive(pid)
    about = os.fstat(held.fds[0])
    assert about.st_blocks * 512 == 8 * MIB, "its end has freed nothing"
    assert memory.held_bytes == 8 * MIB
    memory.let_go(held)
    assert memory.held_bytes == 0
    assert open_files() == before


def test_no_more_is_held_at_once_than_is_allowed():
    before, memory = open_files(), MemoryFiles(12 * MIB)
    with process_with(8 * MIB) as first, process_with(8 * MIB) as second:
        held = memory.hold(first)
        assert memory.hold(second) == Held(), "it frees what it has as it ends"
        assert memory.held_bytes == 8 * MIB
        memory.let_go(held)
        again = memory.hold(second)
        assert again.size_bytes == 8 * MIB
        memory.let_go(again)
    assert open_files() == before


def test_of_what_is_gone_or_not_shown_nothing_is_held(monkeypatch: pytest.MonkeyPatch):
    before, memory = open_files(), MemoryFiles(64 * MIB)
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert memory.hold(gone.pid) == Held()

    def refused(_pidfd: int, _fd: int) -> int:
        raise PermissionError

    with process_with(MIB) as pid:
        monkeypatch.setattr(memfiles.syscalls, "pidfd_getfd", refused)
        assert memory.hold(pid) == Held()
    assert open_files() == before


def test_files_on_a_disk_are_nobodys_to_hold(tmp_path: Path):
    file = tmp_path / "memfd:guest"
    file.write_bytes(b"x" * MIB)
    with file.open() as content:
        process = subprocess.Popen(["sleep", "60"], stdin=content)
    try:
        assert MemoryFiles(64 * MIB).hold(process.pid) == Held()
    finally:
        process.kill()
        process.wait()
