"""up, status, env, doctor, down: on a real instance."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import ssl
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from atoll.programs.layout import BINARIES
from tests.instance.conftest import ATOLL, ROOT, Instance

FROM = Path("/proc")


def test_the_first_up_shows_a_sandbox_and_what_to_do_next(fresh: Callable[[], Instance]) -> None:
    one = fresh()
    said = one.run("up").stdout
    for expected in ("✓ first sandbox", "Debian GNU/Linux 12", "says 5050", "remove", "export E2B_API_KEY='e2b_", "Next:"):
        assert expected in said
    assert one.ids() == set()
    for _ in range(3):  # somebody may be changing the code of this checkout
        started = time.monotonic()
        again = one.run("up").stdout
        elapsed_s = time.monotonic() - started
        if "running already" in again:
            break
    assert "running already" in again
    assert elapsed_s < 10
    assert "says 5050" in again


def test_up_json_is_one_document(instance: Instance) -> None:
    done = instance.json("up", "--json")
    if not done["already_running"]:  # somebody has just changed the code of this checkout
        done = instance.json("up", "--json")
    assert done["already_running"] is True
    assert done["demo"]["python_said"].endswith("says 5050")
    assert done["environment"]["E2B_API_URL"] == f"http://127.0.0.1:{instance.port}"
    assert [step["name"] for step in done["steps"]][-1] == "first sandbox"


def test_status(instance: Instance) -> None:
    seen = instance.json("status", "--json")
    processes = {process["name"]: process for process in seen["processes"]}
    assert {"control", "agent", "edge", "supervisor"} <= set(processes)
    for name in ("control", "agent", "edge"):
        assert {"name", "pid", "address", "version", "healthy"} <= set(processes[name])
        assert processes[name]["healthy"] is True
        assert processes[name]["pid"] == instance.pid(name)
        assert processes[name]["version"]
    assert processes["edge"]["address"] == f"http://127.0.0.1:{instance.port}"
    assert "well" in instance.run("status").stdout


def test_env_is_what_a_shell_takes(instance: Instance) -> None:
    lines = [shlex.split(line) for line in instance.run("env").stdout.splitlines()]
    assert all(words[0] == "export" and len(words) == 2 for words in lines)
    values = dict(words[1].split("=", 1) for words in lines)
    assert values == instance.json("env", "--json")
    # What it prints is enough for our own command line, without ATOLL_HOME.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ATOLL_", "E2B_"))}
    done = subprocess.run([ATOLL, "sandbox", "list", "--json"], env={**kept, **values}, capture_output=True, text=True, check=True)
    assert "items" in json.loads(done.stdout)


def test_doctor_names_each_check_and_the_isolation(instance: Instance) -> None:
    report = instance.json("doctor", "--json")
    assert report["ok"] is True
    assert "gvisor" in report["isolations"]
    ids = [check["id"] for check in report["checks"]]
    assert len(ids) == len(set(ids))
    assert {"instance.config", "instance.secrets", "process.control", "agent.running", "host.disk"} <= set(ids)
    assert any(name.startswith("runtime.runsc") for name in ids), ids
    assert all(check["result"] in {"ok", "warning"} for check in report["checks"])


def test_programs_run_as_who_they_should(instance: Instance) -> None:
    def status(pid: int | str | None) -> dict[str, str]:
        lines = (FROM / str(pid) / "status").read_text().splitlines()
        return dict(line.split(":\t", 1) for line in lines if ":\t" in line)

    agent = instance.pid("agent")
    assert status(agent)["Uid"].split()[0] == "0"
    children = (FROM / str(agent) / "task" / str(agent) / "children").read_text().split()
    (resolver,) = [pid for pid in children if b"\0dns\0" in (FROM / pid / "cmdline").read_bytes()]
    for pid in (instance.pid("control"), instance.pid("edge"), resolver):
        assert status(pid)["Uid"].split()[0] != "0"
        assert int(status(pid)["CapEff"], 16) == 0
        assert status(pid)["NoNewPrivs"] == "1"
        assert b"e2b_" not in (FROM / str(pid) / "environ").read_bytes()
    modes = {"secrets": 0o700, "control": 0o700, "agent": 0o700, "operator.key": 0o600}
    assert {name: stat.S_IMODE((instance.home / name).stat().st_mode) for name in modes} == modes
    for log in instance.layout.log.iterdir():
        assert instance.layout.operator_key.read_text().strip() not in log.read_text(errors="replace")


def test_down_leaves_nothing_and_up_finds_its_records(fresh: Callable[[], Instance]) -> None:
    one = fresh()
    before = one.json("up", "--no-demo", "--json")
    ready = [one.create(), one.create("--class", "shared-kernel")]
    one.exec(ready[0], "sh", "-c", "sleep 1000 >/dev/null 2>&1 &")
    assert one.json("down", "--json")["released"] == 2
    assert one.leftovers() == []
    status = one.json("status", "--json", check=False)
    assert not any(process["healthy"] for process in status["processes"])
    assert one.json("down", "--json") == {"was_running": False, "released": 0, "swept": [], "stopped": []}
    after = one.json("up", "--json")
    assert after["environment"] == before["environment"]
    assert {one.json("sandbox", "get", "--json", sandbox)["state"] for sandbox in ready} == {"released"}
    one.run("down")
    assert one.leftovers() == []


def test_down_without_control_sweeps_and_control_learns_of_it(fresh: Callable[[], Instance]) -> None:
    one = fresh()
    one.run("up", "--no-demo")
    sandbox = one.create()
    for name in ("supervisor", "control", "edge"):
        pid = one.pid(name)
        assert pid is not None
        os.kill(pid, 9)
    swept = one.json("down", "--json")
    assert (swept["released"], len(swept["swept"])) == (0, 1)
    assert one.leftovers() == []
    one.run("up", "--no-demo")
    found = one.json("sandbox", "get", "--json", sandbox)
    assert found["state"] in {"releasing", "released", "failed"}, found


def test_keep_sandboxes_stops_the_programs_only(fresh: Callable[[], Instance]) -> None:
    one = fresh()
    one.run("up", "--no-demo")
    sandbox = one.create()
    one.exec(sandbox, "sh", "-c", "echo here > /home/user/kept")
    one.run("down", "--keep-sandboxes")
    assert one.pid("agent") is None
    assert one.leftovers() != []
    one.run("up", "--no-demo")
    assert one.exec(sandbox, "cat", "/home/user/kept") == "here\n"


def test_new_programs_replace_old_ones_under_sandboxes_that_go_on(fresh: Callable[[], Instance], tmp_path: Path) -> None:
    one = fresh()
    binaries = Path(os.environ.get("ATOLL_BIN") or ROOT / "build" / "bin")
    for name in BINARIES:
        shutil.copy2(binaries / name, one.home / name)
    one.environment["ATOLL_BIN"] = str(one.home)
    one.run("up", "--no-demo")
    sandbox, before = one.create(), one.pid("edge")
    (one.home / "atoll-io").touch()
    assert "stop what is older" in one.run("up", "--no-demo").stdout
    assert one.pid("edge") != before
    assert one.exec(sandbox, "echo", "on") == "on\n"
    assert "running already" in one.run("up", "--no-demo").stdout


def test_control_listens_to_other_machines_after_the_next_up(fresh: Callable[[], Instance]) -> None:
    """As docs/guides/add-a-host.md says, for a machine that has had an instance without it."""
    one = fresh()
    one.run("up", "--no-demo")
    sandbox, before = one.create(), {name: one.pid(name) for name in ("control", "edge")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one.run("control", "listen", f"127.0.0.1:{port}", "--name", "localhost")
    assert "new settings" in one.run("up", "--no-demo").stdout
    assert one.pid("control") != before["control"]
    assert one.pid("edge") == before["edge"]
    assert one.exec(sandbox, "echo", "on") == "on\n"
    said = one.run("host", "enrollment-token", "create", "worker")
    assert f"atoll agent join https://localhost:{port} --name worker --ca-pin sha256:" in said.stdout + said.stderr
    authority = ssl.create_default_context(cafile=str(one.home / "tls-authority.pem"))
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
        authority.wrap_socket(plain, server_hostname="localhost") as shown,
    ):
        assert shown.getpeercert()
    assert "new settings" not in one.run("up", "--no-demo").stdout


def test_a_taken_port_is_named_with_its_owner_and_another_one_works(fresh: Callable[[], Instance]) -> None:
    one = fresh()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", one.port + 1))
        listener.listen()
        done = one.run("up", "--no-demo", check=False)
    assert done.returncode == 1
    assert "PORT_TAKEN" in done.stderr
    assert str(os.getpid()) in done.stderr
    assert "step `ports`" in done.stderr
    assert all(one.pid(name) is None for name in ("control", "agent", "edge", "supervisor"))
    one.run("up", "--no-demo")


def test_a_missing_program_says_what_to_do(fresh: Callable[[], Instance], tmp_path: Path) -> None:
    done = fresh().run("up", check=False, ATOLL_BIN=str(tmp_path))
    assert done.returncode == 1
    assert "RUNTIME_MISSING" in done.stderr
    assert "make up" in done.stderr


def test_a_missing_template_says_what_to_do(fresh: Callable[[], Instance], tmp_path: Path) -> None:
    done = fresh().run("up", check=False, ATOLL_CACHE=str(tmp_path))
    assert done.returncode == 1
    assert "IMAGE_UNAVAILABLE" in done.stderr
    assert "make up" in done.stderr


def test_not_root_says_so_at_once(fresh: Callable[[], Instance]) -> None:
    # The checkout may be in root's home: whoever can read it and is not root.
    readable = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    done = subprocess.run(
        ["setpriv", "--reuid", "65534", "--clear-groups", *readable, "--", ATOLL, "up"],
        env={**os.environ, "ATOLL_HOME": str(fresh().home)},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 1
    assert "NOT_ROOT" in done.stderr
    assert done.stdout == ""


def test_a_home_that_control_cannot_reach_is_refused(fresh: Callable[[], Instance]) -> None:
    one = fresh()
    closed = one.home / "closed"
    closed.mkdir(mode=0o700)
    done = Instance(closed / "home", one.port).run("up", check=False)
    assert done.returncode == 1
    assert str(closed) in done.stderr


def test_a_program_that_cannot_start_is_told_with_its_last_words(fresh: Callable[[], Instance]) -> None:
    one = fresh()
    one.run("up", "--no-demo")
    one.run("down")
    (one.layout.control / "atoll.db").write_bytes(b"this is no database" * 100)
    started = time.monotonic()
    done = one.run("up", check=False)
    assert time.monotonic() - started < 60
    assert done.returncode == 4
    assert "step `control` failed" in done.stderr
    assert "control.log" in done.stderr


def test_two_instances_do_not_meet(instance: Instance, fresh: Callable[[], Instance]) -> None:
    other = fresh()
    other.run("up", "--no-demo")
    mine, theirs = instance.create(), other.create()
    assert mine in instance.ids()
    assert theirs not in instance.ids()
    other.run("down")
    assert other.leftovers() == []
    assert instance.exec(mine, "echo", "on") == "on\n"
    assert instance.run("status").returncode == 0


def test_a_checkout_in_roots_home_is_fine(fresh: Callable[[], Instance]) -> None:
    """Control and edge run as a user who may not pass the directory that the code is in."""
    one = fresh()
    closed = one.home / "root"
    closed.mkdir(mode=0o700)
    code = closed / "checkout"
    (code / "build").mkdir(parents=True)
    for name in ("src", ".venv", "build/bin"):
        subprocess.run(["cp", "-al", ROOT / name, code / name], check=True)
    (link,) = (code / ".venv" / "lib").glob("python*/site-packages/__editable__*.pth")
    text = link.read_text().replace(str(ROOT), str(code))
    link.unlink()  # a hard link to the real one until now
    link.write_text(text)
    python = code / ".venv" / "bin" / "python"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("E2B_", "ATOLL_"))}
    variables = {**kept, "ATOLL_HOME": str(one.home), "ATOLL_PORT": str(one.port)}
    done = subprocess.run(
        [python, "-P", "-m", "atoll.programs.main", "up"], env=variables, cwd="/", capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{one.last_words()}"
    assert "says 5050" in done.stdout
    for name in ("control", "edge"):
        # What it sees there is the code, read-only, and nobody else sees it.
        words = (FROM / str(one.pid(name)) / "cmdline").read_text()
        assert words.startswith(str(one.layout.run / "code")), words
        mounts = (FROM / str(one.pid(name)) / "mounts").read_text().splitlines()
        (mine,) = [line for line in mounts if str(one.layout.run / "code") in line]
        assert mine.split()[3].startswith("ro")
    assert str(one.layout.run / "code") not in Path("/proc/mounts").read_text()
    assert not list((one.layout.run / "code").iterdir())
