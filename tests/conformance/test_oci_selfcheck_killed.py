"""The agent is killed in the midst of its own self-check: what that leaves is nobody's sandbox, and goes with the next run."""

import asyncio
import pickle
import signal
import subprocess
import sys

import pytest

from atoll.drivers.oci.config import RuntimeKind
from atoll.testing.conformance.oci_stand import OciStand, missing

pytestmark = [pytest.mark.root, pytest.mark.runtime]

PROGRAM = """
import asyncio, os, pickle, shutil, signal, sys
from pathlib import Path
from atoll.drivers.oci import record
from atoll.testing.conformance.oci_stand import OciStand

kind, home, places, identity, moment = pickle.loads(open(sys.argv[1], "rb").read())

rmtree = shutil.rmtree

def die(*_args, **_options):
    os.kill(os.getpid(), signal.SIGKILL)

def without_record(directory, **options):
    if not (Path(directory) / record.FILE).exists():
        return rmtree(directory, **options)
    (directory / record.FILE).unlink()
    die()

if moment == "between a directory and its record":
    record.write = die
else:
    shutil.rmtree = without_record

async def run():
    stand = OciStand(kind, home, identity=identity, **places)
    await stand.open()
    await stand.driver.probe()

asyncio.run(run())
"""


@pytest.mark.parametrize("moment", ["between a directory and its record", "while both are removed"])
@pytest.mark.parametrize("kind", [RuntimeKind.CRUN, RuntimeKind.RUNSC])
async def test_what_a_killed_self_check_leaves_is_no_stranger(kind, moment, tmp_path, binaries, cache):
    if lack := missing(kind, binaries, cache):
        pytest.skip(f"needs {lack}")
    places = {"binaries": binaries, "cache": cache}
    first = OciStand(kind, tmp_path, **places)
    file = tmp_path / "wish.pickle"
    file.write_bytes(pickle.dumps((kind, tmp_path, places, first.identity, moment)))
    killed = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", PROGRAM, str(file)], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    stand = OciStand(kind, tmp_path, identity=first.identity, **places)
    assert [path for path in stand.config.state_dir.iterdir() if path.name.startswith("plc_")], "there is something to find"
    await stand.open()
    try:
        assert not await stand.driver.held()
        assert not [path for path in stand.config.state_dir.iterdir() if path.name.startswith("plc_")]
        assert all(probe.ok for probe in await stand.driver.probe() if probe.id.endswith(".boot"))
        assert not await stand.driver.held()
    finally:
        await stand.close()
