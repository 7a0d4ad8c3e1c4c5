"""Several machines on one: each a host in namespaces of its own (network, processes, mounts), and control's replicas on the bridge between them.

A machine is an `unshare`d process tree: to end its first process is to cut its power. Its agent is the real program with the fake driver
(`drivers/fake/kept.py`), whose sandboxes are files that outlive the agent. Partitions are nftables rules inside the machine, clocks are
moved and disks made slow by the preloaded library of `tests/instance`. Everything that is made carries the rig's own name, and is gone after `close`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from atoll.programs import instance, listening
from atoll.programs.layout import Layout
from atoll.programs.users import Account
from tests.removal import leave

ROOT = Path(__file__).resolve().parents[2]
ATOLL = ROOT / ".venv" / "bin" / "atoll"
IMAGE = "sha256:" + "0" * 64
CACHE = Path(os.environ.get("ATOLL_CACHE") or "/var/cache/atoll")
"""Of ready-made images, for real drivers."""
START_S = 60.0
LIVING_OUT = frozenset({"released", "failed"})


def until(condition: Callable[[], object], *, within_s: float, what: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {within_s:.0f} s\n{what()}"
        time.sleep(0.1)


def run(*words: str | Path, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, timeout=120, **options)
    assert not check or done.returncode == 0, f"{' '.join(map(str, words))}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def free_ports(count: int) -> int:
    """The first of so many in a row."""
    return int(run(sys.executable, ROOT / "scripts" / "free_ports.py", str(count)).stdout)


@dataclass
class Misfortune:
    """What goes wrong with the machine of whatever program is started with `environment`."""

    library: Path
    clock: Path
    disk: Path

    @classmethod
    def of(cls, library: Path, name: str) -> Misfortune:
        """With files beside the library."""
        made = cls(library, library.parent / f"{name}.clock", library.parent / f"{name}.sync")
        for file in (made.clock, made.disk):
            file.write_bytes(struct.pack("q", 0))
        return made

    def shift(self, seconds: int) -> None:
        """Its wall clock is off by so much."""
        self._write(self.clock, seconds)

    def slow(self, seconds: float) -> None:
        """Each flush to its disk takes longer by so much."""
        self._write(self.disk, int(seconds * 1e6))

    @staticmethod
    def _write(path: Path, number: int) -> None:
        with path.open("r+b") as file:
            file.write(struct.pack("q", number))

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), "ATOLL_TEST_CLOCK": str(self.clock), "ATOLL_TEST_SYNC": str(self.disk)}


@dataclass
class Program:
    """One process of the rig, with its log."""

    command: list[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            if number == signal.SIGKILL:
                self.process.wait(timeout=30)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return f"--- {self.log.name}\n" + "\n".join(lines[-12:])


class Replica:
    """One control process, on loopback for clients of this machine and over TLS on the bridge."""

    def __init__(self, rig: Rig, number: int) -> None:
        self.rig, self.number = rig, number
        self.layout = Layout(rig.path / f"control-{number}")
        self.port = rig.ports + 3 * number
        self.secure_port = rig.secure_ports + number
        self.misfortune = Misfortune.of(rig.library, f"control-{number}")
        self._prepare()
        environment = rig.environment(ATOLL_HOME=str(self.layout.home), **self.misfortune.environment)
        self.program = Program([sys.executable, "-P", "-m", "atoll.programs.control_main"], environment, rig.path / f"control-{number}.log")

    def _prepare(self) -> None:
        me, layout = Account("root", 0, 0), self.layout
        for directory in (layout.home, layout.secrets, layout.control, layout.run, layout.log):
            directory.mkdir(parents=True, exist_ok=True)
        first = self.rig.replicas[0] if self.rig.replicas else None
        install_id = instance.load(first.layout).install_id if first is not None else self.rig.install_id
        instance.write_config(layout, instance.Config(install_id, self.port, 0, "nobody"))
        if first is not None:
            shutil.copytree(first.layout.secrets, layout.secrets, dirs_exist_ok=True)
            shutil.copy(first.layout.operator_key, layout.operator_key)
            for name in ("tls-authority.pem", "tls-authority.key"):
                shutil.copy(first.layout.home / name, layout.home / name)
        instance.ensure_secrets(layout, me, os.urandom)
        if self.rig.database_url is not None:
            (layout.secrets / "database.url").write_text(self.rig.database_url)
        layout.credential.parent.mkdir(exist_ok=True)
        layout.credential.touch()  # no token for a host of its own
        instance.ensure_bootstrap(layout, me, instance.load(layout))
        listening.listen(
            layout,
            listening.Wanted(
                f"{self.rig.address}:{self.secure_port}", (self.rig.address,), None, None, None, self.rig.secure_urls, "rig", True
            ),
        )

    @property
    def url(self) -> str:
        """Over plain HTTP; the API is the same without an edge."""
        return f"http://127.0.0.1:{self.port + 1}"

    @property
    def secure_url(self) -> str:
        return f"https://{self.rig.address}:{self.secure_port}"

    def start(self) -> None:
        self.program.start()

    def well(self) -> bool:
        try:
            return httpx.get(self.url + "/health", timeout=2, trust_env=False).is_success and _listens(self.rig.address, self.secure_port)
        except httpx.TransportError:
            return False


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


class Machine:
    """One machine with one host."""

    def __init__(self, rig: Rig, number: int) -> None:
        self.rig, self.number, self.name = rig, number, f"host-{number}"
        self.home = rig.path / self.name
        self.address = f"{rig.network}.{number + 10}"
        self.misfortune = Misfortune.of(rig.library, self.name)
        self.first: subprocess.Popen[bytes] | None = None
        self.agent: Program | None = None
        self.binaries: Path | None = None
        """Programs of its own, in the place of those of this checkout."""

    # Power.

    def power_on(self) -> None:
        """Namespaces, an empty /run, an address on the bridge."""
        script = "mount -t tmpfs tmpfs /run && ip link set lo up && exec sleep infinity"
        self.first = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script],
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        until(lambda: self._inner() is not None and self._ready(), within_s=20)
        veth, inner = f"{self.rig.mark}v{self.number}", str(self._inner())
        run("ip", "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", inner)
        run("ip", "link", "set", veth, "master", self.rig.bridge, "up")
        self.inside("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.inside("ip", "link", "set", "eth0", "up")
        # Addresses of sandboxes elsewhere are found by who has them.
        self.inside("ip", "route", "add", "default", "via", self.rig.address)

    def _ready(self) -> bool:
        inner = self._inner()
        return inner is not None and Path(f"/proc/{inner}/comm").read_text().strip() == "sleep"

    def _inner(self) -> int | None:
        """The first process of the machine, as this one numbers it."""
        assert self.first is not None
        with contextlib.suppress(OSError, IndexError):
            return int(Path(f"/proc/{self.first.pid}/task/{self.first.pid}/children").read_text().split()[0])
        return None

    def power_off(self) -> None:
        """Everything on it ends at once, and what was only in memory is gone; disks stay."""
        if self.first is not None:
            inner = self._inner()
            if inner is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(inner, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                self.first.kill()
            self.first.wait(timeout=30)
            self.first = None
        if self.agent is not None:
            self.agent.kill()
            self.agent = None

    @property
    def on(self) -> bool:
        return self.first is not None

    # On it.

    def command(self, *words: str | Path) -> list[str]:
        return ["nsenter", "--target", str(self._inner()), "--net", "--mount", "--uts", "--pid", *map(str, words)]

    def inside(self, *words: str | Path, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        return run(*self.command(*words), check=check, env=self.environment(**environment))

    def environment(self, **more: str) -> dict[str, str]:
        own = {"ATOLL_HOME": str(self.home), "ATOLL_AGENT_DRIVER": self.rig.driver, **self.misfortune.environment}
        if self.binaries is not None:
            own["ATOLL_BIN"] = str(self.binaries)
        return self.rig.environment(**{**own, **more})

    def join(self, token: str, *options: str, check: bool = True, name: str | None = None) -> subprocess.CompletedProcess[str]:
        return self.inside(
            ATOLL, "agent", "join", self.rig.replicas[0].secure_url, "--name", name or self.name, "--ca-pin", self.rig.pin,
            "--token-env", "ATOLL_TOKEN", "--json", *options, check=check, ATOLL_TOKEN=token,
        )  # fmt: skip

    def configure(self, name: str, value: object) -> None:
        """Change a line of its `host.toml`, for agents that are started later."""
        file = self.home / "host.toml"
        text, count = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", file.read_text())
        assert count == 1, name
        file.write_text(text)

    def start_agent(self) -> None:
        command = self.command(sys.executable, "-P", "-m", "atoll.programs.agent_main")
        self.agent = Program(command, self.environment(), self.rig.path / f"{self.name}.log")
        self.agent.start()

    def kill_agent(self) -> None:
        """The program alone; its sandboxes go on."""
        if self.agent is not None:
            self.agent.kill()

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.inside(ATOLL, "agent", "status", "--json", check=False).stdout))

    def held(self) -> dict[str, dict[str, Any]]:
        """What is on its disk, by placement: the truth that nobody's record can talk away."""
        found = {}
        for file in (self.home / "fake-machine").glob("*.json"):
            with contextlib.suppress(FileNotFoundError, ValueError):
                found[file.stem] = json.loads(file.read_text())
        return found

    # Weather.

    def cut(self, *, hears: bool = False, is_heard: bool = False) -> None:
        """Cut it off from everything on the bridge; one way alone, where the other is said to go on."""
        rules = ["add table inet rig", "flush table inet rig"]
        for chain, kept, match in (("input", hears, "iifname"), ("output", is_heard, "oifname")):
            if not kept:
                rules.append(f"add chain inet rig {chain} {{ type filter hook {chain} priority -500; }}")
                rules.append(f"add rule inet rig {chain} {match} eth0 drop")
        self._nft("\n".join(rules))

    def heal(self) -> None:
        self._nft("add table inet rig\ndelete table inet rig")

    def _nft(self, script: str) -> None:
        run(*self.command("nft", "-f", "-"), input=script)


class Rig:
    """Control's replicas and machines; use it in a `with`."""

    def __init__(self, *, replicas: int = 1, machines: int = 3, database_url: str | None = None, driver: str = "fake") -> None:
        self.token = secrets.token_hex(2)
        self.mark = f"rg{self.token}"
        self.bridge = f"{self.mark}br"
        self.network = f"10.2{50 + secrets.randbelow(5)}.{secrets.randbelow(250)}"
        self.address = f"{self.network}.1"
        self.path = Path(tempfile.mkdtemp(prefix="atoll-rig.", dir="/var/tmp"))
        self.path.chmod(0o755)
        self.database_url, self.driver = database_url, driver
        self.install_id = f"ins_{secrets.token_hex(10)}"
        self.library = self._library()
        self._counts = (replicas, machines)
        self.ports, self.secure_ports = free_ports(3 * replicas), free_ports(replicas)
        self.replicas: list[Replica] = []
        self.machines: list[Machine] = []

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "address", "add", f"{self.address}/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        self._lay_images()
        replicas, machines = self._counts
        for number in range(replicas):
            self.replicas.append(Replica(self, number))
            self.replicas[-1].start()
            until(self.replicas[-1].well, within_s=START_S, what=self.last_words)
        self.machines = [Machine(self, number) for number in range(machines)]
        for machine in self.machines:
            machine.power_on()

    def _lay_images(self) -> None:
        """The name of one for machines of files; the real one, shared, for real drivers."""
        templates = self.path / "cache" / "templates"
        templates.mkdir(parents=True)
        if self.driver != "fake":
            (templates / "base").symlink_to(CACHE / "templates" / "base")
            return
        manifest = templates / "base" / "current"
        manifest.mkdir(parents=True)
        (manifest / "manifest.json").write_text(json.dumps({"name": "base", "digest": IMAGE}))

    def close(self) -> None:
        """Take everything down; what is left of the rig is nothing."""
        for machine in self.machines:
            with contextlib.suppress(Exception):
                machine.power_off()
        for replica in self.replicas:
            with contextlib.suppress(Exception):
                replica.program.kill()
        for link in json.loads(run("ip", "-j", "link").stdout):
            if link["ifname"].startswith(self.mark):
                run("ip", "link", "delete", link["ifname"], check=False)
        leave(self.path)

    def _library(self) -> Path:
        library = self.path / "misfortune.so"
        run("cc", "-shared", "-fPIC", "-O1", "-o", library, ROOT / "tests" / "instance" / "misfortune.c")
        return library

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("E2B_", "ATOLL_"))}
        own = {"ATOLL_CACHE": str(self.path / "cache"), "PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1"}
        return {**kept, **own, **more}

    @property
    def pin(self) -> str:
        from atoll.agent.trust import fingerprint

        return fingerprint((self.replicas[0].layout.home / "tls-authority.pem").read_text())

    @property
    def secure_urls(self) -> tuple[str, ...]:
        """Of every replica: what agents dial, one after the other."""
        return tuple(f"https://{self.address}:{self.secure_ports + number}" for number in range(self._counts[0]))

    # What people do.

    def api(self, replica: int = 0, *, timeout_s: float = 70.0) -> httpx.Client:
        key = self.replicas[0].layout.operator_key.read_text().strip()
        return httpx.Client(base_url=self.replicas[replica].url, headers={"X-API-KEY": key}, timeout=timeout_s, trust_env=False)

    def call(self, method: str, path: str, **body: Any) -> Any:
        with self.api(self._living()) as api:
            answer = api.request(method, path, json=body if body or method != "GET" else None)
            answer.raise_for_status()
            return answer.json()

    def _living(self) -> int:
        return next((number for number, replica in enumerate(self.replicas) if replica.program.running), 0)

    def operator_token(self, name: str) -> str:
        return str(self.call("POST", "/v1/enrollment-tokens", hostName=name)["token"])

    def enrol_all(self, **settings: object) -> None:
        """`settings`: of every machine's `host.toml`."""
        for machine in self.machines:
            machine.join(self.operator_token(machine.name))
            for name, value in settings.items():
                machine.configure(name, value)
            machine.start_agent()
        until(lambda: self.healthy() == len(self.machines), within_s=START_S, what=self.last_words)

    def hosts(self) -> dict[str, dict[str, Any]]:
        return {host["name"]: host for host in self.call("GET", "/v1/hosts")["items"]}

    def healthy(self) -> int:
        try:
            hosts = self.hosts().values()
        except httpx.HTTPError:
            return 0
        return sum(host["health"] == "healthy" and not host["problems"] and bool(host["isolations"]) for host in hosts)

    def living(self) -> dict[str, dict[str, Any]]:
        """Every sandbox that has not ended."""
        found: dict[str, dict[str, Any]] = {}
        with self.api(self._living()) as api:
            cursor: str | None = None
            while True:
                answer = api.get("/v1/sandboxes", params={"limit": 100, **({"cursor": cursor} if cursor else {})})
                answer.raise_for_status()
                body = answer.json()
                found |= {one["id"]: one for one in body["items"] if one["state"] not in LIVING_OUT}
                cursor = body.get("nextCursor")
                if not cursor:
                    return found

    def get(self, sandbox_id: str) -> dict[str, Any]:
        return dict(self.call("GET", f"/v1/sandboxes/{sandbox_id}"))

    def last_words(self) -> str:
        programs = [replica.program for replica in self.replicas] + [m.agent for m in self.machines if m.agent is not None]
        return "\n".join(program.last_words() for program in programs)

    # What must be true.

    def doubles(self) -> list[str]:
        """Sandboxes that run on two machines at this moment."""
        counted: Counter[str] = Counter()
        for machine in self.machines:
            counted.update(one["order"]["sandbox_id"] for one in machine.held().values() if one["power"] == "running")
        return [sandbox_id for sandbox_id, count in counted.items() if count > 1]

    def problems(self) -> list[str]:
        """What of the records and of the machines does not agree, once nothing is under way; empty is right."""
        living, hosts = self.living(), self.hosts()
        said = [f"{one['id']} is {one['state']}" for one in living.values() if one["state"] != "ready"]
        placed = {one["placement"]["id"]: one for one in living.values() if one["placement"]}
        there: dict[str, str] = {}
        for machine in self.machines:
            host_id = hosts[machine.name]["id"]
            for placement, found in machine.held().items():
                there[placement] = machine.name
                if placement not in placed:
                    said.append(f"{machine.name} still has {placement} of {found['order']['sandbox_id']}")
                elif placed[placement]["placement"]["hostId"] != host_id:
                    said.append(f"{placement} is on {machine.name}, and on record elsewhere")
            on_record = sum(one["placement"]["hostId"] == host_id for one in placed.values())
            used, slots = hosts[machine.name]["used"], hosts[machine.name]["used"]["slots"]
            if slots != on_record:
                said.append(f"{machine.name} counts {used} for {on_record} sandboxes")
        said += [f"{one['id']} runs nowhere" for placement, one in placed.items() if placement not in there]
        return said + [f"{sandbox_id} runs twice" for sandbox_id in self.doubles()]

    def converge(self, *, within_s: float) -> None:
        """*Raises* AssertionError with what is still wrong."""

        def right() -> bool:
            try:
                return not self.problems()
            except httpx.HTTPError:
                return False

        until(right, within_s=within_s, what=lambda: "\n".join([*self.problems(), self.last_words()]))


@contextlib.contextmanager
def opened(**options: Any) -> Iterator[Rig]:
    """A rig, and its logs when something fails."""
    with Rig(**options) as rig:
        try:
            yield rig
        except BaseException:
            print(rig.last_words(), file=sys.stderr)
            raise


@dataclass
class Load:
    """Clients that create and end sandboxes, and remember what they were promised."""

    rig: Rig
    created: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    """Somebody has asked for its end; whose answer was lost may have been heard all the same."""
    ended: set[str] = field(default_factory=set)
    """And was told so."""
    refused: Counter[str] = field(default_factory=Counter)

    def create(self, *, timeout_s: int = 3600) -> str | None:
        """One sandbox, by whichever replica lives; the request id makes a repeat harmless."""
        request_id = secrets.token_hex(8)
        body = {"template": "base", "timeoutSeconds": timeout_s, "clientRequestId": request_id, "wait": False}
        for attempt in range(6):
            try:
                with self.rig.api((self.rig._living() + attempt) % len(self.rig.replicas), timeout_s=10) as api:
                    answer = api.post("/v1/sandboxes", json=body)
            except httpx.HTTPError as error:
                self.refused[type(error).__name__] += 1
                time.sleep(0.3)
                continue
            if answer.status_code in (200, 201, 202):
                sandbox_id = str(answer.json()["id"])
                self.created.add(sandbox_id)
                return sandbox_id
            self.refused[str(answer.json()["error"]["code"])] += 1
            time.sleep(0.3)
        return None

    def end(self, sandbox_id: str) -> None:
        self.asked.add(sandbox_id)
        for attempt in range(6):
            try:
                with self.rig.api((self.rig._living() + attempt) % len(self.rig.replicas), timeout_s=10) as api:
                    answer = api.delete(f"/v1/sandboxes/{sandbox_id}")
            except httpx.HTTPError:
                time.sleep(0.3)
                continue
            if answer.status_code in (200, 202, 404):
                self.ended.add(sandbox_id)
                return
            time.sleep(0.3)

    def lost(self) -> list[str]:
        """Sandboxes that were promised, that nobody ended, and that are gone all the same."""
        living = self.rig.living()
        return [f"{one}: {self.rig.get(one)['reason']}" for one in sorted(self.created - self.asked - set(living))]

    def undead(self) -> list[str]:
        """Sandboxes that were ended and live all the same."""
        return sorted(self.ended & set(self.rig.living()))
