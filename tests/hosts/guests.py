"""Real guests on a rig's machines: what it takes to have them, and what one does with a sandbox from outside and inside."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.hosts.rig import CACHE, Machine, Rig, until

BINARIES = Path(os.environ.get("ATOLL_BIN") or Path(__file__).resolve().parents[2] / "build" / "bin")
COUNT = "import time\nn=0\nwhile True:\n    n+=1\n    open('/home/user/count','w').write(str(n))\n    time.sleep(0.02)\n"

# Speaks to a guest where it is: on its machine, at its slot's address.
INSIDE = """
import base64, http.client, json, struct, sys
address, token, user, script = sys.argv[1:]
body = json.dumps({"process": {"cmd": "/bin/sh", "args": ["-c", script]}, "stdin": False}).encode()
ask = http.client.HTTPConnection(address, 49983, timeout=30)
ask.request("POST", "/process.Process/Start", struct.pack(">BI", 0, len(body)) + body, {
    "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1", "X-Access-Token": token,
    "Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode()})
answer = ask.getresponse()
assert answer.status == 200, (answer.status, answer.read())
out = b""
while True:
    flag, length = struct.unpack(">BI", answer.read(5))
    message = json.loads(answer.read(length))
    if flag & 2:
        assert "error" not in message, message
        break
    out += base64.b64decode(message.get("event", {}).get("data", {}).get("stdout", ""))
sys.stdout.write(out.decode())
"""


def missing() -> str | None:
    """What this machine lacks for guests of a real runtime."""
    if not (CACHE / "templates" / "base" / "current").exists():
        return f"the base template in {CACHE} (make up)"
    return next(
        (f"{BINARIES / name} (make build)" for name in ("atoll-guest", "atoll-io", "runsc") if not (BINARIES / name).exists()), None
    )


class Guest:
    """One sandbox, and what is in it."""

    def __init__(self, rig: Rig, on: Machine) -> None:
        self.rig = rig
        made = rig.call("POST", "/v1/sandboxes", timeoutSeconds=3600, preferHost=on.name)
        self.id, self.token = made["id"], made["accessToken"]
        assert self.machine is on

    @classmethod
    def woken_by_traffic(cls, rig: Rig) -> Guest:
        """As E2B's clients ask for it; on any machine."""
        made = rig.call("POST", "/sandboxes", templateID="base", timeout=3600, autoPause=True, secure=True, autoResume={"enabled": True})
        guest = cls.__new__(cls)
        guest.rig, guest.id, guest.token = rig, made["sandboxID"], made["envdAccessToken"]
        return guest

    @property
    def view(self) -> dict[str, Any]:
        return self.rig.get(self.id)

    @property
    def machine(self) -> Machine | None:
        placement = self.view["placement"]
        names = {host["id"]: name for name, host in self.rig.hosts().items()}
        return next((one for one in self.rig.machines if placement and one.name == names[placement["hostId"]]), None)

    def sh(self, script: str, user: str = "user") -> str:
        machine = self.machine
        assert machine is not None
        record = json.loads((machine.home / "sandboxes" / self.view["placement"]["id"] / "placement.json").read_text())
        return machine.inside(sys.executable, "-c", INSIDE, record["address"], self.token, user, script).stdout

    def count(self) -> int:
        while not (text := self.sh("cat count")):
            time.sleep(0.01)
        return int(text)

    def suspend(self) -> None:
        self.rig.call("POST", f"/v1/sandboxes/{self.id}/suspend")

    def stored(self) -> None:
        until(lambda: self.view["stored"], within_s=60, what=self.rig.last_words)

    def resume(self) -> dict[str, Any]:
        return dict(self.rig.call("POST", f"/v1/sandboxes/{self.id}/resume"))

    def delete(self) -> None:
        self.rig.call("DELETE", f"/v1/sandboxes/{self.id}")
        until(lambda: self.view["state"] == "released", within_s=60, what=self.rig.last_words)


def counting(rig: Rig, on: Machine) -> tuple[Guest, str]:
    """A guest whose memory counts, and the digest of a file of its."""
    guest = Guest(rig, on)
    guest.sh(f"cat >count.py <<'E'\n{COUNT}E\nhead -c 8000000 /dev/urandom >kept; (python3 count.py >/dev/null 2>&1 &); sleep 0.5")
    return guest, guest.sh("sha256sum kept")


def resumed(guest: Guest) -> dict[str, Any]:
    """Asked again until its machine is known to be lost, or full."""
    answers: list[str] = []

    def back() -> bool:
        with guest.rig.api() as api:
            answer = api.post(f"/v1/sandboxes/{guest.id}/resume")
        answers.append(answer.text)
        return answer.is_success

    until(back, within_s=60, what=lambda: f"{answers[-1]}\n{guest.rig.last_words()}")
    return guest.view
