"""Our own clients: `/v1` over kept connections, and the guest's contract through the edge or straight to the guest.

Both ways into a guest send the same bytes; only the address and the routing headers differ.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import aiohttp

from atoll.client import connect
from atoll.domain.warmth import OWN_TEAM
from atoll.wire.guest import GUEST_PORT
from bench.product import CannotMeasure, Instance

TRUE: Final = ("/bin/true",)
LOGIN_TRUE: Final = ("/bin/bash", "-l", "-c", "true")
"""What the SDK makes of `commands.run("true")`."""
GONE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Made:
    """A sandbox that is ready."""

    id: str
    placement_id: str
    access_token: str


class Inside:
    """One way to one guest."""

    def __init__(self, session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> None:
        self._session = session
        self.url = url
        self.headers = headers

    async def run(self, command: tuple[str, ...], *, user: str = "root") -> int:
        """Run a command to its end; its exit code. *Errors*: CannotMeasure."""
        body = connect.encode({"process": {"cmd": command[0], "args": list(command[1:])}, "stdin": False})
        headers = {**self.headers, **_as(user), "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
        async with self._session.post(f"{self.url}/process.Process/Start", data=body, headers=headers) as answer:
            data = await answer.read()
            if answer.status != 200:
                raise CannotMeasure(f"start was answered with {answer.status}: {data[:300]!r}")
        for _, message in connect.Frames().feed(data):
            end = (message.get("event") or {}).get("end")
            if end is not None:
                return int(end.get("exitCode") or 0)
        raise CannotMeasure(f"the command did not end: {data[:300]!r}")

    async def write(self, path: str, content: bytes) -> None:
        """Write a file. *Errors*: CannotMeasure."""
        headers = {**self.headers, "Content-Type": "application/octet-stream"}
        async with self._session.post(f"{self.url}/files", params={"path": path}, data=content, headers=headers) as answer:
            data = await answer.read()
            if answer.status != 200:
                raise CannotMeasure(f"the write was answered with {answer.status}: {data[:300]!r}")

    async def read(self, path: str) -> bytes:
        """Read a file. *Errors*: CannotMeasure."""
        async with self._session.get(f"{self.url}/files", params={"path": path}, headers=self.headers) as answer:
            data = await answer.read()
            if answer.status != 200:
                raise CannotMeasure(f"the read was answered with {answer.status}: {data[:300]!r}")
            return data


def _as(user: str) -> dict[str, str]:
    return {"Authorization": aiohttp.encode_basic_auth(user, "")} if user else {}


class Api:
    """`/v1` of an instance, and ways into its sandboxes."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self._headers = {"X-API-KEY": instance.key}

    async def __aenter__(self) -> Self:
        self.session = client_session()
        return self

    async def __aexit__(self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        await self.session.close()

    async def create(self, class_name: str, template: str = "base", /, *, cpu_millis: int, memory_mib: int, disk_mib: int) -> Made:
        """Create a sandbox and wait until it is ready."""
        size = {"cpuMillis": cpu_millis, "memoryMib": memory_mib, "diskMib": disk_mib}
        body: dict[str, Any] = {"class": class_name, "template": template, "timeoutSeconds": 900, "size": size}
        answer = await self._call("POST", "/v1/sandboxes", json=body)
        return Made(answer["id"], answer["placement"]["id"], answer["accessToken"])

    async def create_waking(self, template: str = "base") -> Made:
        """Create one that traffic wakes, as E2B's clients ask for it, of its template's size and the default class."""
        body = {"templateID": template, "timeout": 900, "secure": True, "autoPause": True, "autoResume": {"enabled": True}}
        answer = await self._call("POST", "/sandboxes", json=body)
        placement = (await self._call("GET", f"/v1/sandboxes/{answer['sandboxID']}"))["placement"]
        return Made(answer["sandboxID"], placement["id"], answer["envdAccessToken"])

    async def rest(self, made: Made, verb: str) -> None:
        """`pause`, `suspend` or `resume` it, and wait until it is so."""
        await self._call("POST", f"/v1/sandboxes/{made.id}/{verb}")

    async def snapshot(self, made: Made) -> str:
        """Keep what it is now; the snapshot's id."""
        return str((await self._call("POST", f"/v1/sandboxes/{made.id}/snapshots"))["id"])

    async def drop(self, snapshot_id: str) -> None:
        """Delete a snapshot."""
        await self._call("DELETE", f"/v1/snapshots/{snapshot_id}")

    async def fork(self, made: Made, count: int) -> list[Made]:
        """So many clones. *Errors*: CannotMeasure when one is not there."""
        items = (await self._call("POST", f"/v1/sandboxes/{made.id}/forks", json={"count": count}))["items"]
        if failed := [item["error"] for item in items if item["error"] is not None]:
            raise CannotMeasure(f"{len(failed)} of {count} clones failed: {failed[0]['message']}")
        answers = [item["sandbox"] for item in items]
        return [Made(one["id"], one["placement"]["id"], one["accessToken"]) for one in answers]

    async def keep_warm(self, template: str, class_name: str, count: int, *, cpu_millis: int, memory_mib: int, disk_mib: int) -> None:
        """Have so many guests of it made ahead."""
        size = {"cpuMillis": cpu_millis, "memoryMib": memory_mib, "diskMib": disk_mib}
        await self._call("PUT", f"/v1/templates/{template}/warm", json={"count": count, "class": class_name, "size": size})

    async def warm(self) -> set[str]:
        """Which guests are made ahead, and ready."""
        items = (await self._call("GET", "/v1/sandboxes?team=*&state=ready&limit=100"))["items"]
        return {one["id"] for one in items if one["teamId"] == OWN_TEAM}

    async def ask(self, path: str) -> None:
        """A call that makes nothing."""
        await self._call("GET", path)

    async def delete(self, sandbox_id: str) -> None:
        """Ask for its end."""
        await self._call("DELETE", f"/v1/sandboxes/{sandbox_id}")

    async def wait_gone(self, sandbox_id: str) -> None:
        """Wait until nothing is left of it. *Errors*: CannotMeasure after a minute."""
        deadline = time.monotonic() + GONE_S
        while (await self._call("GET", f"/v1/sandboxes/{sandbox_id}"))["state"] not in ("released", "failed"):
            if time.monotonic() > deadline:
                raise CannotMeasure(f"{sandbox_id} is not gone after {GONE_S:.0f} s")
            await asyncio.sleep(0.01)

    async def end(self, sandbox_id: str) -> None:
        """Delete it and wait until it is gone."""
        await self.delete(sandbox_id)
        await self.wait_gone(sandbox_id)

    async def import_archive(self, name: str, archive: Path, *, within_s: float) -> None:
        """Make a template of an archive, and wait until it is there. *Errors*: CannotMeasure."""
        with archive.open("rb") as file:
            sent = await self._call("PUT", "/v1/template-archives", data=file)
        one = await self._call("POST", "/v1/template-imports", json={"name": name, "source": f"archive:{sent['archive']}"})
        deadline = time.monotonic() + within_s
        while one["state"] == "running" and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            one = await self._call("GET", f"/v1/template-imports/{one['id']}")
        if one["state"] != "ready":
            raise CannotMeasure(f"the import of {name} is {one['state']}: {one.get('message')}")

    async def delete_template(self, name: str) -> None:
        """Have no template of this name, once the last sandbox of it, which was ended just now, has gone."""
        until = asyncio.get_running_loop().time() + GONE_S
        while True:
            async with self.session.delete(f"{self.instance.url}/v1/templates/{name}", headers=self._headers) as answer:
                if answer.status in (200, 404):
                    return
                if answer.status != 409 or asyncio.get_running_loop().time() > until:
                    raise CannotMeasure(f"template {name} cannot be deleted: {answer.status} {await answer.text()}")
            await asyncio.sleep(0.2)

    def through_edge(self, made: Made) -> Inside:
        """The way that clients take."""
        headers = {"E2b-Sandbox-Id": made.id, "E2b-Sandbox-Port": str(GUEST_PORT), "X-Access-Token": made.access_token}
        return Inside(self.session, self.instance.url, headers)

    async def direct(self, made: Made) -> Inside:
        """Straight to the guest's address, which only this machine reaches."""
        headers = {"Authorization": f"Bearer {self.instance.edge_token}"}
        async with self.session.get(f"{self.instance.control_url}/internal/edge/v1/routes/{made.id}", headers=headers) as answer:
            if answer.status != 200:
                raise CannotMeasure(f"the route of {made.id} was answered with {answer.status}")
            address = (await answer.json())["reach"]["ip"]
        return Inside(self.session, f"http://{address}:{GUEST_PORT}", {"X-Access-Token": made.access_token})

    async def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        async with self.session.request(method, self.instance.url + path, headers=self._headers, **options) as answer:
            body: dict[str, Any] = await answer.json()
            if answer.status >= 300:
                raise CannotMeasure(f"{method} {path} was answered with {answer.status}: {body}")
            return body


def client_session() -> aiohttp.ClientSession:
    """A client with as many kept connections as it needs."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120.0), auto_decompress=False)
