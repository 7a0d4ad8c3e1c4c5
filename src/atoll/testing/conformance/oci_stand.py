"""The stand of the `oci` drivers: an instance of its own name and subnet on this machine, beside whatever else runs here."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.base.ids import Prefix, new_id
from atoll.domain.spec import Spec
from atoll.drivers.oci.build import oci_driver, slot_pool
from atoll.drivers.oci.config import Names, OciConfig, RuntimeKind
from atoll.drivers.oci.driver import OciDriver, no_step
from atoll.drivers.oci.slots import SlotPool
from atoll.drivers.oci.slotworks import gateway_of
from atoll.drivers.port import Driver, Mark, Order, Seen
from atoll.images.cache import MOUNT_POINTS, CachedImage, ImageCache, count
from atoll.testing.conformance.guest import GuestClient
from atoll.testing.conformance.stand import World
from atoll.testing.conformance.world import world
from atoll.wire.guest import Init

SUBNETS: Final = range(32, 64)
POOL: Final = 3
GUEST_PATIENCE_S: Final = 20.0


def missing(kind: RuntimeKind, binaries: Path, cache: Path) -> str | None:
    """What this machine lacks for the stand, and how to get it; None when nothing."""
    if os.geteuid() != 0:
        return "root (run the tests with sudo)"
    if not (binaries / "atoll-guest").exists():
        return f"{binaries / 'atoll-guest'} (make build)"
    if kind is RuntimeKind.RUNSC and not (binaries / "runsc").exists():
        return f"{binaries / 'runsc'} (make build)"
    if kind is RuntimeKind.CRUN and not (shutil.which("crun") or shutil.which("runc")):
        return "crun or runc (apt-get install crun)"
    if not (cache / "templates" / "base" / "current").exists():
        return f"the base template in {cache} (make up)"
    return None


def free_subnet() -> int:
    """A subnet number whose gateway address nobody on this machine has."""
    taken = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    return random.choice([number for number in SUBNETS if f" {gateway_of(number)}/" not in taken])


class OciStand:
    """A Stand with an oci driver on a state directory of its own."""

    memory_mib_min = 256
    patience_s = GUEST_PATIENCE_S
    """How long a guest may take until it answers."""

    def __init__(
        self,
        kind: RuntimeKind,
        home: Path,
        *,
        binaries: Path,
        cache: Path,
        identity: tuple[Mark, int] | None = None,
        on_step: Callable[[str], None] = no_step,
    ) -> None:
        """`identity`: mark and subnet of an instance that exists already, in the same home."""
        self._home = home
        self._on_step = on_step
        known = identity or (Mark(new_id(Prefix.INSTALL, os.urandom), new_id(Prefix.HOST, os.urandom)), free_subnet())
        self.mark, self._subnet = self.identity = known
        self.key = Ed25519PrivateKey.generate()
        self._image = ImageCache(cache).current("base")
        self._given_cache = cache
        self._cache = home / "cache"
        (self._cache / "templates").mkdir(parents=True, exist_ok=True)
        if not (self._cache / "templates" / "base").exists():
            (self._cache / "templates" / "base").symlink_to(self._image.directory.parent)
        self.names = Names.of(self.mark)
        self.config = OciConfig(
            runtime=kind,
            state_dir=home / "sandboxes",
            run_dir=home / "run",
            image_cache=self._cache,
            guest_binary=binaries / "atoll-guest",
            packer=binaries / "atoll-io",
            mark=self.mark,
            runsc=binaries / "runsc",
            crun=Path(shutil.which("crun") or "/usr/bin/crun"),
            runc=Path(shutil.which("runc") or "/usr/sbin/runc"),
        )
        self.exits: list[tuple[str, str]] = []
        self.pool, self.driver = self._make()
        self._strangers: list[OciDriver] = []

    @property
    def gateway_address(self) -> str:
        return gateway_of(self._subnet)

    def _make(self) -> tuple[SlotPool, OciDriver]:
        pool = slot_pool(self.mark, subnet=self._subnet, size=POOL)
        return pool, self._driver_of(self.config, pool)

    def _driver_of(self, config: OciConfig, pool: SlotPool) -> OciDriver:
        return oci_driver(config, pool, on_step=self._on_step)

    def rebuild(self) -> None:
        """Make the driver again from a changed `config`; before `open`."""
        self.pool, self.driver = self._make()

    async def open(self) -> None:
        await self.driver.open(self._on_exit)

    async def close(self) -> None:
        """Remove whatever a failed case left, and the instance itself."""
        for stranger in self._strangers:
            await stranger.close()
        for held in await self.driver.held():
            await self.driver.remove(held.placement_id)
        await self.driver.close()

    async def _on_exit(self, placement_id: str, reason: str) -> None:
        self.exits.append((placement_id, reason))

    # -- the Stand

    def order(self, **spec: Any) -> Order:
        isolation = self.driver.capabilities.isolation
        plain = Spec(
            class_name="default",
            template_id="tpl_conformance",
            image=self._image.digest,
            image_name=self._image.name,
            isolation=isolation,
            cpu_millis=1000,
            memory_mib=512,
            disk_mib=1024,
            pids_max=512,
            timeout_s=300,
        )
        public = base64.b64encode(self.key.public_key().public_bytes_raw()).decode()
        return Order(
            placement_id=new_id(Prefix.PLACEMENT, os.urandom),
            sandbox_id=new_id(Prefix.SANDBOX, os.urandom),
            generation=random.randrange(1, 9),
            spec=replace(plain, **spec),
            nonce=os.urandom(12).hex(),
            guest_public_key=public,
            hostname="conformance",
        )

    async def reopen(self) -> Driver:
        self.driver.abandon()
        self.pool.abandon()
        self.pool, self.driver = self._make()
        await self.open()
        return self.driver

    async def close_driver(self) -> Driver:
        await self.driver.close()
        self.pool, self.driver = self._make()
        await self.open()
        return self.driver

    async def stranger(self) -> Driver:
        mark = Mark(self.mark.install_id, new_id(Prefix.HOST, os.urandom))
        other = self._driver_of(replace(self.config, mark=mark), self.pool)
        await other.open(self._on_exit)
        self._strangers.append(other)
        return other

    async def guest(self, order: Order, seen: Seen) -> GuestClient:
        assert seen.address is not None
        client = GuestClient(seen.address, order, self.key)
        await client.hello(patience_s=self.patience_s)
        await client.init(Init(default_user="user", hostname=order.hostname))
        return client

    async def end_guest(self, order: Order, seen: Seen) -> None:
        assert seen.pid is not None
        os.kill(seen.pid, signal.SIGKILL)

    def cpu_used_s(self, order: Order) -> float:
        group = f"{self.names.cgroup}/{order.placement_id}"
        old = Path("/sys/fs/cgroup/cpuacct") / group / "cpuacct.usage"
        if old.exists():
            return int(old.read_text()) / 1e9
        fields = dict(line.split() for line in (Path("/sys/fs/cgroup") / group / "cpu.stat").read_text().splitlines())
        return int(fields["usage_usec"]) / 1e6

    @contextlib.asynccontextmanager
    async def damage_image(self) -> AsyncIterator[Order]:
        directory = self._cache / "templates" / "damaged" / "recipe"
        for point in MOUNT_POINTS:
            (directory / "rootfs" / point).parent.mkdir(parents=True, exist_ok=True)
            (directory / "rootfs" / point).touch()
        entries, size_bytes = count(directory / "rootfs")
        manifest = {"name": "damaged", "recipe_sha256": "recipe", "digest": "sha256:" + "d" * 64, "arch": "x86_64"}
        (directory / "manifest.json").write_text(json.dumps({**manifest, "entries": entries + 1, "size_bytes": size_bytes}))
        try:
            yield self.order(image=manifest["digest"], image_name="damaged")
        finally:
            shutil.rmtree(directory.parent)

    @contextlib.asynccontextmanager
    async def world(self) -> AsyncIterator[World]:
        with world(self.gateway_address) as made:
            yield made

    def image(self) -> CachedImage:
        """The image that orders name."""
        return self._image

    def traces(self, order: Order) -> Sequence[str]:
        """Read with other means than the driver's: find, ip, nft, the whole process table."""
        name = order.placement_id
        found = [str(path) for root in (self._home, Path("/sys/fs/cgroup")) for path in _find(root, name)]
        found += [f"process {pid}" for pid in _processes_naming(name)]
        found += [f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines() if name in line]
        found += [f"loop {line}" for line in _output("losetup", "-a").splitlines() if name in line]
        links = json.loads(_output("ip", "-j", "link"))
        found += [f"link {link['ifname']}" for link in links if link.get("ifalias") == name]
        return [*found, *self._orphaned_elements({link["ifname"] for link in links})]

    def _orphaned_elements(self, links: set[str]) -> list[str]:
        """Elements of slots whose interface does not exist."""
        addresses = {route["dst"] for route in json.loads(_output("ip", "-j", "route")) if route.get("dev") in links}
        found = []
        for item in json.loads(_output("nft", "-j", "list", "table", *self.names.table.split()))["nftables"]:
            if item.get("set", {}).get("name") in {"slots", "open4", "allow4", "deny4"}:
                for element in item["set"].get("elem", []):
                    words = element.get("concat", [element]) if isinstance(element, dict) else [element]
                    if not addresses & {str(word) for word in words}:
                        found.append(f"element {item['set']['name']} {words}")
        return found


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout or "[]"


def _find(root: Path, name: str) -> list[str]:
    done = subprocess.run(["find", str(root), "-name", f"*{name}*"], capture_output=True, text=True, check=False)
    return done.stdout.split()


def _processes_naming(name: str) -> list[int]:
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if name.encode() in (directory / "cmdline").read_bytes() or name in (directory / "cgroup").read_text():
                found.append(int(directory.name))
    return found
