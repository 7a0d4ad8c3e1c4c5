"""Each guest process of gVisor unmaps its command line, and a look for a placement's strays waited 50 ms for each: 6.5 s on a host with few guests."""

import subprocess
import sys
import time

import pytest

from atoll.hostops import processes

UNMAPS = """
import ctypes
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
first, end = int(fields[45]) & ~4095, (int(fields[46]) + 4095) & ~4095
libc = ctypes.CDLL(None)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
print("ready", flush=True)
libc.munmap(first, end - first)
libc.pause()
"""


@pytest.fixture
def emptied():
    process = subprocess.Popen([sys.executable, "-c", UNMAPS], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.1)
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_nobody_waits_for_a_command_line_that_is_not_there_any_more(emptied, monkeypatch):
    slept = []
    monkeypatch.setattr(processes.time, "sleep", slept.append)
    assert emptied.poll() is None, "it runs without"
    assert processes.arguments(emptied.pid) == []
    assert slept == []
