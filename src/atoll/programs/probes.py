"""Is each program well: asked from outside, over the addresses that its users use. Standard library only, and short."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from atoll.programs import identity
from atoll.programs.files import read_json
from atoll.programs.instance import Config
from atoll.programs.layout import Layout

TIMEOUT_S: Final = 2.0
AGENT_HEARD_S: Final = 60.0
"""An answered poll is at most 25 s of parking old; twice that, and some, means that control does not hear it."""


@dataclass(frozen=True, slots=True)
class ProcessView:
    """One program, as `status` shows it. `address` is None for the agent: it dials out and listens nowhere."""

    name: str
    pid: int | None
    address: str | None
    version: str | None
    healthy: bool
    detail: str = ""


def look(name: str, layout: Layout, config: Config) -> ProcessView:
    """One program now."""
    running = identity.living(layout.pid_file(name))
    address = {"control": config.control_url, "edge": config.url}.get(name)
    if running is None:
        return ProcessView(name, None, address, None, healthy=False, detail="not running")
    version, problem = _ASK[name](layout, config)
    return ProcessView(name, running.pid, address, version, healthy=not problem, detail=problem)


def _control(_layout: Layout, config: Config) -> tuple[str | None, str]:
    status, body = _get(config.control_port, "/health")
    if status == 0:
        return None, f"does not answer on {config.control_url}: {body}"
    problem = "" if status < 300 else f"/health answers {status}"
    return _version(body) or _own_version(), problem


def _edge(_layout: Layout, config: Config) -> tuple[str | None, str]:
    status, body = _get(config.admin_port, "/healthz")
    if status == 0:
        return None, f"does not answer on {config.admin_url}: {body}"
    answer = _object(body)
    version = _version(body)
    if status != 200 or answer.get("healthy") is not True:
        return version, "says that it is not healthy"
    if answer.get("synced") is not True:
        return version, "has no routes from control yet"
    return version, ""


def _agent(layout: Layout, _config: Config) -> tuple[str | None, str]:
    record = read_json(layout.agent_health)
    running = identity.living(layout.pid_file("agent"))
    if record is None or running is None or record.get("pid") != running.pid:
        return None, "control has not answered it yet"
    version = str(record.get("version") or "") or None
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - float(record.get("boot_s") or 0.0)
    if age_s > AGENT_HEARD_S:
        return version, f"control has not answered it for {age_s:.0f} s"
    return version, str(record.get("problem") or "")


def _registry(layout: Layout, _config: Config) -> tuple[str | None, str]:
    status, body = over_socket(layout.registry_socket, "GET", "/-/health")
    if status == 0:
        return None, f"does not answer: {body}"
    return _own_version(), "" if status == 200 else f"/-/health answers {status}"


_ASK: Final = {"control": _control, "edge": _edge, "agent": _agent, "registry": _registry}


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        # However deep the directory: the kernel takes 107 bytes.
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(f"/proc/self/fd/{folder}/{self._path.name}")
        finally:
            os.close(folder)


def over_socket(path: Path, method: str, target: str, *, timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    """One request to a program that listens on a socket of this machine; status 0 and why when it does not answer."""
    connection = _Unix(path, timeout_s)
    try:
        connection.request(method, target, headers={"Connection": "close"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error) or type(error).__name__
    finally:
        connection.close()


def _get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        answer = connection.getresponse()
        return answer.status, answer.read(65536).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error) or type(error).__name__
    finally:
        connection.close()


def _object(body: str) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _version(body: str) -> str | None:
    version = _object(body).get("version")
    return str(version) if version else None


def _own_version() -> str:
    from importlib.metadata import version

    return version("atoll")
