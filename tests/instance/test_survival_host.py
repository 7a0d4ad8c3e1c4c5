"""What others do to the machine under a running instance: its firewall is flushed, an interface is deleted, a database is lost."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from typing import Any

import pytest
from e2b import Sandbox

from tests.instance.conftest import Instance, until
from tests.instance.storm import WEATHER
from tests.instance.survival import Client, install_of, kill, look, problems


def settled(instance: Instance, client: Client) -> None:
    until(lambda: not problems(instance, client), within_s=60, what=lambda: f"{problems(instance, client)}\n{instance.last_words()}")


def table_of(instance: Instance) -> str:
    return f"atoll_{install_of(instance)[:8]}"


def elements(instance: Instance, name: str) -> set[str]:
    """Of one set; nothing while there is no table."""
    asked = ["nft", "-j", "list", "set", "inet", table_of(instance), name]
    listed = subprocess.run(asked, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        return set()
    return {
        json.dumps(element) for item in json.loads(listed.stdout)["nftables"] if "set" in item for element in item["set"].get("elem", [])
    }


def answers(sandbox: Sandbox) -> bool:
    try:
        return sandbox.commands.run("echo on", timeout=5, request_timeout=10).stdout == "on\n"
    except WEATHER:
        return False


@pytest.mark.parametrize("restart", [False, True])
def test_a_flushed_firewall_is_written_again(instance: Instance, client: Client, restart: bool) -> None:
    """And whoever was reachable is so again, within the same limits; everything can be made and removed."""
    sandbox, closed = client.create(), client.create("shared-kernel", network={"internet": False})
    address = json.loads((instance.layout.sandboxes / placement(client, sandbox) / "placement.json").read_text())["address"]
    assert f'"{address}"' in elements(instance, "open4")
    opened = len(elements(instance, "open4"))
    if restart:
        kill(instance, "supervisor", number=signal.SIGSTOP)
        kill(instance, "agent")
    subprocess.run(["nft", "delete", "table", "inet", table_of(instance)], check=True)
    kill(instance, "supervisor", number=signal.SIGCONT)
    until(lambda: len(elements(instance, "slots")) >= 2)
    if not restart:
        # What an agent that was away cannot know stays closed.
        assert len(elements(instance, "open4")) == opened
    until(lambda: answers(sandbox) and answers(closed))
    other = client.create()
    assert answers(other)
    for one in (sandbox, closed, other):
        assert client.kill(one.sandbox_id) is True
    settled(instance, client)
    instance.until_well(90)


def test_a_create_and_a_delete_meet_a_flushed_firewall_first(instance: Instance, client: Client) -> None:
    for _ in range(3):
        sandbox = client.create()
        subprocess.run(["nft", "delete", "table", "inet", table_of(instance)], check=True)
        other = client.create("shared-kernel")
        subprocess.run(["nft", "delete", "table", "inet", table_of(instance)], check=False, capture_output=True)
        assert client.kill(sandbox.sandbox_id) is True
        assert client.kill(other.sandbox_id) is True
    settled(instance, client)


def placement(client: Client, sandbox: Sandbox) -> str:
    return str(client.get(sandbox.sandbox_id)["placement"]["id"])


@pytest.mark.parametrize("class_name", ["default", "shared-kernel"])
def test_a_sandbox_whose_interface_was_deleted_can_be_ended(instance: Instance, client: Client, class_name: str) -> None:
    sandbox = client.create(class_name)
    mine = placement(client, sandbox)
    links: list[dict[str, Any]] = json.loads(
        subprocess.run(["ip", "-j", "-details", "link"], capture_output=True, text=True, check=True).stdout
    )
    (name,) = [link["ifname"] for link in links if link.get("ifalias") == mine]
    subprocess.run(["ip", "link", "delete", name], check=True)
    assert not answers(sandbox)
    assert client.kill(sandbox.sandbox_id) is True
    until(lambda: client.state(sandbox.sandbox_id) == "released")
    settled(instance, client)


@pytest.mark.timeout(300)
def test_an_agent_that_lost_its_database_takes_its_guests_over(instance: Instance, client: Client) -> None:
    """Control's word explains what stands on the machine; what was to end meanwhile ends."""
    boxes = [client.create(name) for name in ("default", "shared-kernel")]
    for box in boxes:
        box.files.write("/home/user/kept", "kept")
    before = {box.sandbox_id: look(instance).pids[placement(client, box)] for box in boxes}
    deleted = client.create()
    kill(instance, "supervisor", number=signal.SIGSTOP)
    kill(instance, "agent")
    for path in instance.layout.agent.glob("agent.db*"):
        path.unlink()
    assert client.kill(deleted.sandbox_id) is True
    kill(instance, "supervisor", number=signal.SIGCONT)
    # Nothing shows that it is the same host's next run, so it waits until the last one has surely ended.
    until(lambda: client.state(deleted.sandbox_id) == "released", within_s=90, what=instance.last_words)
    instance.until_well(90)
    for box in boxes:
        assert client.get(box.sandbox_id)["state"] == "ready"
        assert box.files.read("/home/user/kept") == "kept"
        assert look(instance).pids[placement(client, box)] & before[box.sandbox_id]
        assert client.kill(box.sandbox_id) is True
    settled(instance, client)
    assert answers(client.create())


def test_an_agent_whose_database_is_broken_says_so(instance: Instance, client: Client) -> None:
    """It touches nothing then: guests go on, and the command lines say what is wrong."""
    sandbox = client.create()
    kill(instance, "supervisor", number=signal.SIGSTOP)
    kill(instance, "agent")
    files = sorted(instance.layout.agent.glob("agent.db*"))
    kept = {path: path.read_bytes() for path in files}
    for path in files:
        path.unlink()
    (instance.layout.agent / "agent.db").write_bytes(b"this is no database" * 1000)
    kill(instance, "supervisor", number=signal.SIGCONT)
    until(lambda: "STORE_UNAVAILABLE" in instance.layout.log_file("agent").read_text(errors="replace"), what=instance.last_words)
    assert answers(sandbox)
    said = instance.run("up", "--no-demo", check=False)
    assert said.returncode != 0
    assert "step `agent` failed" in said.stderr
    assert "agent.db" in said.stderr
    for path, content in kept.items():
        path.write_bytes(content)
    instance.run("up", "--no-demo")
    assert answers(sandbox)
    began = time.monotonic()
    assert client.kill(sandbox.sandbox_id) is True
    until(lambda: client.state(sandbox.sandbox_id) == "released")
    assert time.monotonic() - began < 30
    settled(instance, client)


def test_what_the_machine_has_is_what_control_counts(instance: Instance, client: Client) -> None:
    """The comparison itself finds what is wrong."""
    sandbox = client.create()
    settled(instance, client)
    (stray := instance.layout.sandboxes / "plc_00000000000000000000").mkdir()
    assert any("plc_00000000000000000000" in line for line in problems(instance, client))
    stray.rmdir()
    assert len(look(instance).guests[placement(client, sandbox)]) == 1
    client.kill(sandbox.sandbox_id)
    settled(instance, client)
