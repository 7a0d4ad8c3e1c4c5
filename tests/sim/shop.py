"""A workshop that only pretends to have files, for tests of builds: what would happen in its sandboxes is noted."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

from atoll.base.errors import Code, Refused, Unavailable
from atoll.control.builds.port import Bench, Ended, Layer, Pulled, Told
from atoll.control.service import Caller
from atoll.domain.building import Build, Result


@dataclass
class Bank:
    """A bench: `false` fails, `hang` waits until it is let go, `linger` a moment, the rest is done at once."""

    shop: Shop
    image: str
    done: list[str] = field(default_factory=list)

    async def run(self, command: Sequence[str], *, user: str, cwd: str | None, env: Mapping[str, str], told: Told) -> Ended:
        text = command[-1] if command[0] == "/bin/bash" else " ".join(["script", *command[4:]])
        self.shop.environments.append((text, dict(env)))
        self.shop.ran.append(text)
        self.done.append(text)
        if user == "nobody-here":
            return Ended(None, "unauthenticated: invalid username: 'nobody-here'")
        told("info", f"{user}@{cwd}: {text} {env.get('WORD', '')}".strip())
        if text == "hang":
            self.shop.hanging.set()
            await self.shop.let_go.wait()
        if text.startswith("linger"):
            await asyncio.sleep(0.02)
        return Ended(1 if text == "false" else 0)

    async def put(self, path: str, source: Path) -> None:
        content = source.read_bytes()
        self.shop.put.append((path, content))
        self.done.append(f"put {path} {hashlib.sha256(content).hexdigest()}")

    async def get(self, path: str, target: Path) -> None:
        content = repr((self.image, self.done)).encode()
        target.write_bytes(content)
        self.shop.passed.append(target)

    async def layer(self) -> Layer:
        if self.shop.losses > 0:
            self.shop.losses -= 1
            raise Refused(self.shop.lost_by, "the guest ended while its files were handed out")
        content = repr((self.image, self.done)).encode()
        entries = 0 if self.done == ["true"] else 1
        return Layer(f"sha256:{hashlib.sha256(content).hexdigest()}", len(content), entries)


@dataclass
class Shop:
    """A workshop without sandboxes; what it made outlives a control process, as a store of images does."""

    ran: list[str] = field(default_factory=list)
    images: set[str] = field(default_factory=set)
    pulled: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)
    tried: list[Result] = field(default_factory=list)
    environments: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    """What images of this source are from now on."""
    put: list[tuple[str, bytes]] = field(default_factory=list)
    roots: dict[str, Path] = field(default_factory=dict)
    passed: list[Path] = field(default_factory=list)
    """Where what one stage gives to another was on its way."""
    losses: int = 0
    """Benches that go while their layer is handed out."""
    lost_by: Code = Code.PLACEMENT_LOST
    has_bucket: bool = False
    bucket: dict[str, bytes] = field(default_factory=dict)
    """Caches of RUNs that control's replicas have in common."""
    bucket_lost: Unavailable | None = None
    open: int = 0
    most: int = 0
    tidied: int = 0
    retired: int = 0
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    let_go: asyncio.Event = field(default_factory=asyncio.Event)

    async def pull(self, source: str, caller: Caller, credentials: Mapping[str, str], told: Told) -> Pulled:
        self.pulled.append((source, dict(credentials)))
        if "missing" in source:
            raise Refused(Code.IMAGE_UNAVAILABLE, f"{source} is not there")
        named = self.digests.get(source, source)
        return Pulled(f"sha256:{hashlib.sha256(named.encode()).hexdigest()}", ("FROM=image", "PATH=/opt/bin:/bin"))

    @contextlib.asynccontextmanager
    async def bench(self, build: Build, image: str) -> AsyncIterator[Bench]:
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            yield Bank(self, image)
        finally:
            self.open -= 1

    async def try_out(self, build: Build, result: Result) -> str:
        self.tried.append(result)
        if "broken" in result.command[-1]:
            raise Refused(Code.START_COMMAND_FAILED, "the start command ended with status 1")
        return "the start command is ready"

    async def retire(self) -> None:
        self.retired += 1

    async def extend(self, image: str, layer: Layer) -> str:
        made = f"sha256:{hashlib.sha256((image + layer.digest).encode()).hexdigest()}"
        self.images.add(made)
        return made

    async def compose(self, root: Path) -> str:
        made = f"sha256:{hashlib.sha256(b'composed' + root.read_bytes()).hexdigest()}"
        self.images.add(made)
        self.roots[made] = root.with_name(f"root-{made[-8:]}")
        root.rename(self.roots[made])
        return made

    async def root_of(self, image: str) -> Path:
        return self.roots[image]

    async def has(self, image: str) -> bool:
        return image in self.images

    async def bring(self, archive: Path) -> bool:
        return archive.is_file()

    async def bring_cache(self, archive: Path) -> None:
        if self.bucket_lost is not None:
            raise self.bucket_lost
        if archive.name in self.bucket:
            archive.parent.mkdir(parents=True, exist_ok=True)
            archive.write_bytes(self.bucket[archive.name])

    async def share_cache(self, archive: Path, *, team_bytes_max: int) -> None:
        if self.bucket_lost is not None:
            raise self.bucket_lost
        if self.has_bucket:
            self.bucket[archive.name] = archive.read_bytes()

    def keeping(self) -> AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def clear(self, build: Build) -> None:
        return

    async def release_orphans(self) -> None:
        return

    async def tidy(self) -> None:
        self.tidied += 1

    async def collect(self) -> None:
        return
