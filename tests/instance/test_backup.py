"""A running instance is backed up and taken back: control alone is away for a moment, what runs in sandboxes goes on."""

from __future__ import annotations

import json
import stat
import time

from tests.instance.conftest import Instance, until

TICK = "nohup sh -c 'while true; do echo tick >> /tmp/ticks; sleep 0.1; done' >/dev/null 2>&1 &"


def ticks(instance: Instance, sandbox: str) -> int:
    return len(instance.exec(sandbox, "cat", "/tmp/ticks").split())


def test_back_to_a_backup_and_on(instance: Instance) -> None:
    kept, killed = instance.create(), instance.create()
    instance.exec(kept, "sh", "-c", TICK)
    file = instance.home / "control.backup"
    made = instance.json("backup", "create", str(file), "--json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {path.rpartition("/")[2] for path in made["keep_with_it"]} == {
        "config.toml", "sealing.key", "token.key", "guest-ed25519", "edge.token",
    }  # fmt: skip
    since = instance.create()
    instance.exec(since, "sh", "-c", TICK)
    instance.run("sandbox", "rm", "--wait", killed)
    before = {name: instance.pid(name) for name in ("control", "agent", "edge")}
    seen = {one: ticks(instance, one) for one in (kept, since)}
    taken = instance.json("backup", "restore", str(file), "--json")
    assert taken["running"]
    assert taken["incarnation"] != made["incarnation"]
    assert instance.pid("control") != before["control"]
    assert (instance.pid("agent"), instance.pid("edge")) == (before["agent"], before["edge"])
    until(lambda: instance.ids() == {kept, since}, what=instance.last_words)
    for one in (kept, since):
        # The edge hears of a record that is there again a moment after the list has it.
        until(lambda one=one: instance.run("sandbox", "exec", one, "--", "true", check=False).returncode == 0)  # type: ignore[misc]
        until(lambda one=one: ticks(instance, one) > seen[one])  # type: ignore[misc]
    gone = json.loads(instance.run("sandbox", "get", killed, "--json").stdout)
    assert (gone["state"], gone["reason"]) == ("released", "PLACEMENT_LOST")
    fresh = instance.create()
    assert instance.exec(fresh, "echo", "on") == "on\n"
    for one in (kept, since, fresh):
        instance.run("sandbox", "rm", "--wait", one)
    assert instance.ids() == set()
    assert stat.S_IMODE(instance.layout.database.stat().st_mode) == 0o600
    for path in instance.layout.control.glob("atoll.db*"):
        assert path.stat().st_uid == instance.layout.control.stat().st_uid, path


def test_a_damaged_backup_is_refused_and_nothing_stops(instance: Instance) -> None:
    kept = instance.create()
    file = instance.home / "damaged.backup"
    instance.run("backup", "create", str(file))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    control = instance.pid("control")
    refused = instance.run("backup", "restore", str(file), "--json", check=False)
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["error"]["code"] == "BACKUP_INVALID"
    time.sleep(1.0)
    assert instance.pid("control") == control
    assert kept in instance.ids()
    instance.run("sandbox", "rm", "--wait", kept)
