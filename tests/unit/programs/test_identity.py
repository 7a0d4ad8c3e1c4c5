import json
import os
import subprocess
import time
from pathlib import Path

from atoll.programs import identity


def test_a_living_process_is_recognised(tmp_path: Path) -> None:
    me = identity.of(os.getpid())
    assert me is not None
    assert me.alive()
    file = tmp_path / "x.pid"
    identity.write(file, me, name="x", mark="m1")
    assert identity.living(file) == me
    assert identity.mark_of(file) == "m1"


def test_a_reused_pid_is_somebody_else(tmp_path: Path) -> None:
    me = identity.of(os.getpid())
    assert me is not None
    file = tmp_path / "x.pid"
    identity.write(file, identity.Identity(me.pid, me.started_ticks - 1, me.boot_id))
    assert identity.living(file) is None
    identity.write(file, identity.Identity(me.pid, me.started_ticks, "another boot"))
    assert identity.living(file) is None


def test_a_zombie_does_not_run(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "100"])
    seen = identity.of(child.pid)
    assert seen is not None
    child.kill()
    deadline = time.monotonic() + 5
    while seen.alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not seen.alive()
    assert identity.of(child.pid) is None
    child.wait()
    assert identity.of(child.pid) is None


def test_names_with_brackets_and_spaces_are_read(tmp_path: Path) -> None:
    program = tmp_path / "a) (b"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(program), "100"])
    try:
        seen = identity.of(child.pid)
        assert seen is not None
        assert seen.alive()
        assert seen.started_ticks > 1000
    finally:
        child.kill()
        child.wait()


def test_a_broken_pid_file_names_nobody(tmp_path: Path) -> None:
    file = tmp_path / "x.pid"
    for text in ("", "{}", "[]", "12", json.dumps({"pid": "x"})):
        file.write_text(text)
        assert identity.living(file) is None
        assert identity.mark_of(file) is None
