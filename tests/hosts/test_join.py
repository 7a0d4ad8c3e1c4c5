"""A machine becomes a host over the network, by the commands that people use; and everything that may go wrong on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.hosts.rig import ATOLL, Machine, Rig, run, until


def code(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0, done.stdout
    error = json.loads(done.stdout)["error"]
    assert error["hint"]
    return str(error["code"])


@pytest.fixture
def machine(joining: Rig) -> Machine:
    """One that is no host: what an earlier test made of it is taken away."""
    one = joining.machines[0]
    if one.agent is not None:
        one.agent.kill()
        one.agent = None
    if one.name in joining.hosts():
        joining.call("POST", f"/v1/hosts/{one.name}/disable", off=True)
        until(lambda: joining.hosts()[one.name]["sandboxes"] == 0, within_s=20)
        joining.call("POST", f"/v1/hosts/{one.name}/reset")
    if (one.home / "host.toml").exists():
        one.inside(ATOLL, "agent", "leave")
    return one


def test_a_machine_joins_works_and_knows_what_it_is(joining: Rig, machine: Machine) -> None:
    token = joining.operator_token(machine.name)
    made = json.loads(machine.join(token, "--label", "disk=ssd", "--reserve-memory", "100M", "--region", "attic").stdout)
    assert made["new"] is True
    host = joining.hosts()[machine.name]
    assert (host["id"], host["region"], host["labels"], host["admin"]) == (made["hostId"], "attic", {"disk": "ssd"}, "active")
    assert host["registered"]["reserve"]["memoryMib"] == 100
    assert host["capacity"]["memoryMib"] == host["registered"]["inventory"]["memoryMib"] - 100
    assert (machine.home / "agent" / "credential").stat().st_mode & 0o777 == 0o600
    files = [path for path in machine.home.rglob("*") if path.is_file()]
    assert token not in "".join(path.read_text(errors="replace") for path in files)
    assert machine.status()["running"] is False
    machine.start_agent()
    until(lambda: joining.hosts()[machine.name]["health"] == "healthy", within_s=30, what=joining.last_words)
    sandbox_id = joining.call("POST", "/v1/sandboxes", timeoutSeconds=600)["id"]
    told = machine.status()
    assert (told["running"], told["hostId"], told["installId"]) == (True, made["hostId"], joining.install_id)
    assert 200 < told["leaseLeftSeconds"] <= 300
    assert [one["sandboxId"] for one in told["placements"]] == [sandbox_id]
    report = json.loads(machine.inside(ATOLL, "agent", "doctor", "--json").stdout)
    assert report["ok"], report
    assert any(check["id"].startswith("control.clock") for check in report["checks"])
    machine.kill_agent()
    after = machine.status()
    assert (after["running"], len(after["placements"])) == (False, 1), "told from its journal"


def test_again_it_sees_that_it_is_a_host_and_needs_no_token(joining: Rig, machine: Machine) -> None:
    machine.join(joining.operator_token(machine.name))
    credential = (machine.home / "agent" / "credential").read_bytes()
    again = json.loads(machine.join("whatever").stdout)
    assert again["new"] is False
    assert (machine.home / "agent" / "credential").read_bytes() == credential
    assert code(machine.join("whatever", "--label", "a=b", check=False)) == "ENROLLMENT_CONFLICT"


def test_a_join_that_is_killed_anywhere_is_finished_by_the_next_one(joining: Rig, machine: Machine) -> None:
    """At ten moments over the time that a join takes; each time the same token, and one host."""
    token = joining.operator_token(machine.name)
    environment = machine.environment(ATOLL_TOKEN=token)
    words = machine.command(
        ATOLL, "agent", "join", joining.replicas[0].secure_url, "--name", machine.name, "--ca-pin", joining.pin, "--token-env", "ATOLL_TOKEN"
    )  # fmt: skip
    for tenth in range(4, 14):
        process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        time.sleep(tenth / 10)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    machine.join(token)
    host = joining.hosts()[machine.name]
    machine.start_agent()
    until(lambda: joining.hosts()[machine.name]["health"] == "healthy", within_s=30, what=joining.last_words)
    assert joining.hosts()[machine.name]["id"] == host["id"]
    assert not (machine.home / "agent" / "enrollment.draft").exists()


def test_two_joins_at_once_are_one_host(joining: Rig, machine: Machine) -> None:
    token = joining.operator_token(machine.name)
    words = machine.command(
        ATOLL, "agent", "join", joining.replicas[0].secure_url, "--name", machine.name, "--ca-pin", joining.pin,
        "--token-env", "ATOLL_TOKEN", "--json",
    )  # fmt: skip
    both = [subprocess.Popen(words, env=machine.environment(ATOLL_TOKEN=token), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [json.loads(one.communicate(timeout=60)[0]) for one in both]
    assert len({one["hostId"] for one in said}) == 1
    assert sorted(one["new"] for one in said) == [False, True]


def test_a_used_token_is_worth_nothing_on_another_machine(joining: Rig, machine: Machine) -> None:
    token = joining.operator_token(machine.name)
    machine.join(token)
    thief = joining.machines[1]
    assert code(thief.join(token, check=False, name=machine.name)) in {"ENROLLMENT_TOKEN_INVALID", "ENROLLMENT_CONFLICT"}
    assert code(thief.join(token, check=False)) == "ENROLLMENT_CONFLICT"
    assert not (thief.home / "agent" / "credential").exists()


def test_a_token_comes_by_file_and_by_standard_input_and_never_by_the_command_line(joining: Rig, machine: Machine, tmp_path: Path) -> None:
    url = joining.replicas[0].secure_url
    common = (ATOLL, "agent", "join", url, "--name", machine.name, "--ca-pin", joining.pin, "--json")
    assert code(machine.inside(*common, "--token-file", tmp_path / "missing", check=False)) == "ENROLLMENT_TOKEN_INVALID"
    done = run(*machine.command(*common), input=joining.operator_token(machine.name) + "\n", env=machine.environment())
    assert json.loads(done.stdout)["new"] is True
    assert "--token " not in machine.inside(ATOLL, "agent", "join", "--help").stdout


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("--ca-pin", "sha256:" + "0" * 64), "CONTROL_UNTRUSTED"),
        (("--ca-pin", "sha256:short"), "INVALID_REQUEST"),
        ((), "CONTROL_UNTRUSTED"),
    ],
)
def test_a_control_that_is_not_the_one_that_was_meant_gets_no_token(
    joining: Rig, machine: Machine, change: tuple[str, ...], expected: str
) -> None:
    token = joining.operator_token(machine.name)
    url = joining.replicas[0].secure_url
    common = (ATOLL, "agent", "join", url, "--name", machine.name, "--token-env", "ATOLL_TOKEN", "--json")
    assert code(machine.inside(*common, *change, check=False, ATOLL_TOKEN=token)) == expected
    assert not (machine.home / "agent" / "credential").exists()
    machine.join(token)


def test_plain_http_to_another_machine_is_refused(joining: Rig, machine: Machine) -> None:
    done = machine.inside(
        ATOLL, "agent", "join", f"http://{joining.address}:{joining.replicas[0].port + 1}", "--token-env", "T", "--json", check=False, T="t"
    )
    assert code(done) == "TLS_REQUIRED"


def test_a_machine_registers_by_an_operators_key(joining: Rig, machine: Machine, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(joining.replicas[0].layout.operator_key.read_text())
    common = ("--name", machine.name, "--ca-pin", joining.pin, "--key-file", key, "--json")
    first = json.loads(machine.inside(ATOLL, "agent", "register", joining.replicas[0].secure_url, *common).stdout)
    again = json.loads(machine.inside(ATOLL, "agent", "register", joining.replicas[0].secure_url, *common).stdout)
    assert (first["new"], again["new"], again["hostId"]) == (True, False, first["hostId"])
    machine.start_agent()
    until(lambda: joining.hosts()[machine.name]["health"] == "healthy", within_s=30, what=joining.last_words)


def test_setup_prepares_and_checks_without_enrolling(joining: Rig, machine: Machine) -> None:
    url = joining.replicas[0].secure_url
    done = machine.inside(ATOLL, "agent", "setup", url, "--name", machine.name, "--ca-pin", joining.pin, "--json", check=False)
    report = json.loads(done.stdout)
    assert report["ok"] is False, "it has no credential yet"
    assert [check["id"] for check in report["checks"] if check["result"] == "failed"] == ["agent.credential"]
    machine.join(joining.operator_token(machine.name))


def test_what_other_machines_may_not_call(joining: Rig) -> None:
    """The listener for other machines is control without what belongs to its own edge; and it speaks nothing but TLS."""
    here = joining.replicas[0]
    authority = str(here.layout.home / "tls-authority.pem")

    def status(path: str) -> int:
        done = run("curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "--cacert", authority, here.secure_url + path)
        return int(done.stdout)

    assert status("/.well-known/atoll") == 200
    assert status("/v1/hosts") == 401
    assert status("/internal/edge/v1/routes/stream") == 404
    plain = run("curl", "-sS", "-m", "5", f"http://{joining.address}:{here.secure_port}/.well-known/atoll", check=False)
    assert plain.returncode != 0
    assert run("curl", "-sS", "-m", "5", here.secure_url + "/.well-known/atoll", check=False).returncode == 60


def test_a_new_certificate_is_shown_without_a_restart(joining: Rig, machine: Machine) -> None:
    machine.join(joining.operator_token(machine.name))
    machine.start_agent()
    until(lambda: joining.hosts()[machine.name]["health"] == "healthy", within_s=30, what=joining.last_words)
    here = joining.replicas[0]

    def shown() -> str:
        return run(
            "sh",
            "-c",
            f"openssl s_client -connect {joining.address}:{here.secure_port} </dev/null 2>/dev/null | openssl x509 -noout -serial",
        ).stdout

    before = shown()
    from atoll.programs import listening

    listening.listen(
        here.layout, listening.Wanted(f"{joining.address}:{here.secure_port}", (joining.address,), None, None, None, (), "rig", True)
    )
    until(lambda: shown() != before, within_s=20)
    machine.kill_agent()
    machine.start_agent()
    until(lambda: machine.status()["running"] and machine.status()["answeredSecondsAgo"] < 5, within_s=30, what=joining.last_words)


@pytest.mark.parametrize("skew_s", [3600, -3600])
def test_a_machine_whose_clock_is_an_hour_off_is_told_and_takes_nothing(joining: Rig, machine: Machine, skew_s: int) -> None:
    machine.join(joining.operator_token(machine.name))
    machine.misfortune.shift(skew_s)
    try:
        report = json.loads(machine.inside(ATOLL, "agent", "doctor", "--json", check=False).stdout)
        (clock,) = [check for check in report["checks"] if check["id"].startswith("control.clock")]
        assert clock["result"] == "failed"
        machine.start_agent()
        until(lambda: joining.hosts()[machine.name]["problems"] == ["host.clock_skew"], within_s=60, what=joining.last_words)
        (condition,) = joining.hosts()[machine.name]["conditions"]
        assert str(skew_s) in condition["detail"]
    finally:
        machine.misfortune.shift(0)
    until(lambda: joining.hosts()[machine.name]["problems"] == [], within_s=90, what=joining.last_words)


def test_a_full_disk_uses_no_token_up(joining: Rig, machine: Machine) -> None:
    token = joining.operator_token(machine.name)
    machine.home.mkdir(exist_ok=True)
    machine.inside("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", machine.home)
    machine.inside("sh", "-c", f"dd if=/dev/zero of={machine.home}/full bs=1k count=1000 2>/dev/null; true")
    done = machine.join(token, check=False)
    assert code(done) == "SETUP_FAILED"
    assert "space" in done.stdout
    machine.inside("umount", machine.home)
    assert json.loads(machine.join(token).stdout)["new"] is True


def test_a_disabled_machine_comes_back_after_a_reset_only(joining: Rig, machine: Machine) -> None:
    machine.join(joining.operator_token(machine.name))
    host_id = joining.hosts()[machine.name]["id"]
    joining.call("POST", f"/v1/hosts/{machine.name}/disable", off=True)
    assert code(machine.join(joining.operator_token(machine.name), check=False)) == "ENROLLMENT_CONFLICT"
    joining.call("POST", f"/v1/hosts/{machine.name}/reset")
    made = json.loads(machine.join(joining.operator_token(machine.name)).stdout)
    assert (made["new"], made["hostId"]) == (True, host_id)
