"""Moments: what hosts have saved, taken into the artifact store, given to those that go on from it, and collected.

Theory of operation. A host sends what control has on record for it: a placement it holds, or a snapshot it keeps. It asks which packs are
missing, sends those (here, or to the bucket by links), and the manifest last. That is taken only if every pack is there, and sure to stay: a
pack is sure if it is young, or if a moment that is still needed has it. With the manifest goes a receipt under the placement's or snapshot's
name, which keeps the moment needed as long as the host holds what it is of: so nothing is lost of which control has not heard yet, and the
next save finds what it need not send. A host has what it was told to go on from, and nothing else. What nobody needs goes once it is old.
Why: docs/adr/0031.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from atoll.base.errors import AtollError, Code, Refused, Unavailable
from atoll.control import asgi
from atoll.control.artifacts.giving import LINK_S, give_file
from atoll.control.artifacts.rests import Rests
from atoll.control.asgi import Receive, Scope, Send
from atoll.domain.host import Host
from atoll.images.artifacts import Artifacts, Info, key_of
from atoll.images.library import Collected
from atoll.images.moments import MANIFEST_BYTES_MAX, MOMENTS, PACK_BYTES_MAX, PACKS, Manifest, read_manifest
from atoll.store import restoring, sending
from atoll.store.engine import Store
from atoll.store.moments import fetchable, needed
from atoll.telemetry import events
from atoll.telemetry.log import get_logger

LOG = get_logger()

PREFIX: Final = "moments/"
RECEIPTS: Final = "receipts"
ASKED_MAX: Final = 512
BASES_MAX: Final = 8
SIDE_BY_SIDE: Final = 4
KNOWN_MAX: Final = 64
COLLECT_EVERY_S: Final = 900.0
FRESH_S: Final = 6 * 3600.0
"""What is younger is not collected: a host may still be sending what stands on it, for as long as half of this."""
SURE_S: Final = FRESH_S / 2
"""A pack that is younger stays for as long again: whoever collects has long listed what is to go by then."""
_NAME: Final = re.compile(r"[a-z]{3}_[0-9a-z]{20}")
_HEX: Final = re.compile(r"[0-9a-f]{64}")
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(slots=True)
class Moments:
    """Of one control process. `now`: wall seconds, as the artifact store tells them."""

    store: Store
    artifacts: Artifacts
    now: Callable[[], float]
    rests: Rests | None = None
    """Notes of whose they are."""
    bytes_max: Callable[[], int] = lambda: 0
    """Of one moment; 0: there is no limit."""
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SIDE_BY_SIDE))
    _known: OrderedDict[str, Manifest] = field(default_factory=OrderedDict)

    async def serve(self, host: Host, scope: Scope, receive: Receive, send: Send, call: str) -> None:
        """Answer a call below PREFIX. *Errors*: Refused FORBIDDEN, INVALID_REQUEST, MOMENT_*; those of Artifacts."""
        match scope["method"], *call.split("/"):
            case "GET", digest if _DIGEST.fullmatch(digest):
                await self._may_have(host, digest)
                await self._answer(key_of(MOMENTS, digest), scope, send)
            case "GET", digest, "packs", pack if _DIGEST.fullmatch(digest) and _HEX.fullmatch(pack):
                await self._give_pack(host, digest, pack, scope, send)
            case "GET", name, "last":
                await self._may_send(host, name)
                await self._give_last(name, scope, send)
            case "POST", name, "missing":
                await self._may_send(host, name)
                await self._say_missing(name, receive, send)
            case "PUT", name, "packs", pack if _HEX.fullmatch(pack):
                await self._may_send(host, name)
                await self._take_pack(pack, receive)
                await asgi.answer(send, 204, b"")
            case "PUT", name, "manifests", digest if _DIGEST.fullmatch(digest):
                await self._may_send(host, name)
                async with self._room:
                    content = await asgi.body(receive, limit=MANIFEST_BYTES_MAX)
                    await self.take(name, digest, content, asgi.header(scope, b"atoll-bases").split(","))
                await asgi.answer(send, 204, b"")
            case _:
                raise Refused(Code.INVALID_REQUEST, "no such call of moments")

    # -- what may be sent, and had

    async def _may_send(self, host: Host, name: str) -> None:
        if _NAME.fullmatch(name) is None or not await self.store.read(lambda conn: sending.held(conn, [name], host_id=host.id)):
            raise Refused(Code.FORBIDDEN, f"{name[:40]!r} is nothing that this host has saved or keeps")

    async def _may_have(self, host: Host, digest: str) -> None:
        if digest not in await self.store.read(lambda conn: fetchable(conn, host.id)):
            raise Refused(Code.FORBIDDEN, "this host was not told to go on from this moment")

    # -- taking

    async def _say_missing(self, name: str, receive: Receive, send: Send) -> None:
        """Which packs are not there, or may go, and where each may be sent: here, where no link is said."""
        try:
            asked = json.loads(await asgi.body(receive, limit=1 << 20))["packs"]
        except (ValueError, KeyError, TypeError):
            raise Refused(Code.INVALID_REQUEST, "the question names packs") from None
        if not isinstance(asked, list) or len(asked) > ASKED_MAX or not all(isinstance(one, str) and _HEX.fullmatch(one) for one in asked):
            raise Refused(Code.INVALID_REQUEST, f"the question names at most {ASKED_MAX} packs")
        sure, young = await self._sure(name, (), ""), self.now() - SURE_S
        missing = [
            pack for pack, info in (await self._heads(asked)).items() if info is None or (pack not in sure and info.changed_at < young)
        ]
        links = [await self.artifacts.put_link(_pack_key(pack), lasts_s=LINK_S) for pack in missing]
        said = [{"pack": pack, "link": link or ""} for pack, link in zip(missing, links, strict=True)]
        await asgi.answer(send, 200, json.dumps({"missing": said}).encode(), headers=((b"cache-control", b"no-store"),))

    async def _heads(self, packs: Iterable[str]) -> dict[str, Info | None]:
        found: dict[str, Info | None] = {}

        async def look(name: str) -> None:
            async with room:
                found[name] = await self.artifacts.head(_pack_key(name))

        room = asyncio.Semaphore(2 * SIDE_BY_SIDE)
        wanted = list(dict.fromkeys(packs))
        for result in await asyncio.gather(*(look(name) for name in wanted), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        return {name: found[name] for name in wanted}

    async def _take_pack(self, name: str, receive: Receive) -> None:
        async with self._room:
            content = await asgi.body(receive, limit=PACK_BYTES_MAX)
            if not content or await asyncio.to_thread(lambda: hashlib.sha256(content).hexdigest()) != name:
                raise Refused(Code.MOMENT_CORRUPT, f"pack {name} is not what its name says")
            await self.artifacts.write(_pack_key(name), content)

    async def take(self, name: str, digest: str, content: bytes, bases: Collection[str] = ()) -> None:
        """Have a moment whose packs are all there. `bases`: moments that it shares packs with, as the host says.

        *Errors*: Refused MOMENT_CORRUPT, MOMENT_TOO_LARGE, MOMENT_INCOMPLETE (a pack is not there, is another, or may go); those of Artifacts.
        *Idempotency*: one that is there stays.
        """
        manifest = await asyncio.to_thread(read_manifest, digest, content)
        size, most = sum(manifest.packs.values()), self.bytes_max()
        if most and size > most:
            # Hosts are told, and compare before they send anything: this is for one that does not.
            raise Refused(Code.MOMENT_TOO_LARGE, f"its packs have {size >> 20} MiB, and at most {most >> 20} are taken")
        sure = await self._sure(name, [base for base in bases if _DIGEST.fullmatch(base)][:BASES_MAX], digest)
        now = self.now()
        for pack, info in (await self._heads(manifest.packs)).items():
            if info is None or info.size != manifest.packs[pack]:
                if info is not None:
                    # By a link anything can be sent; what has another size is no pack of anybody's.
                    await self.artifacts.delete(info.key)
                raise Refused(Code.MOMENT_INCOMPLETE, f"pack {pack} is not there, or is another")
            if pack not in sure and info.changed_at < now - SURE_S:
                raise Refused(Code.MOMENT_INCOMPLETE, f"pack {pack} is of a moment that nobody needs any more")
        await self.artifacts.write(key_of(MOMENTS, digest), content)
        if self.rests is not None:
            await self.rests.note(name, digest, content)
        await self.artifacts.write(f"{RECEIPTS}/{name}", digest.encode())
        self._remember(manifest)

    async def _sure(self, name: str, bases: Collection[str], digest: str) -> set[str]:
        """Packs that stay as long as this host holds what it sends, or somebody needs what they are of."""
        wanted = await self.store.read(needed)
        mine = await self._receipt(name)
        known = [base for base in dict.fromkeys((*bases, digest)) if base in wanted or base == mine]
        if mine is not None and mine not in known:
            known.append(mine)
        found: set[str] = set()
        for base in known:
            manifest = await self._manifest(base)
            found |= set(manifest.packs) if manifest is not None else set()
        return found

    async def _receipt(self, name: str) -> str | None:
        try:
            said = (await self.artifacts.read(f"{RECEIPTS}/{name}", bytes_max=100)).decode()
        except Refused as error:
            if error.code in (Code.ARTIFACT_NOT_FOUND, Code.BODY_TOO_LARGE):
                return None
            raise
        except UnicodeDecodeError:
            return None
        return said if _DIGEST.fullmatch(said) else None

    # -- giving

    async def _give_last(self, name: str, scope: Scope, send: Send) -> None:
        digest = await self._receipt(name)
        if digest is None:
            raise Refused(Code.MOMENT_UNAVAILABLE, f"nothing of {name} is in the store")
        await self._answer(key_of(MOMENTS, digest), scope, send)

    async def _give_pack(self, host: Host, digest: str, pack: str, scope: Scope, send: Send) -> None:
        await self._may_have(host, digest)
        manifest = await self._manifest(digest)
        if manifest is None:
            raise Refused(Code.MOMENT_UNAVAILABLE, f"manifest {digest} is not in the store")
        if pack not in manifest.packs:
            raise Refused(Code.FORBIDDEN, f"pack {pack} is not of this moment")
        await self._answer(_pack_key(pack), scope, send)

    async def _answer(self, key: str, scope: Scope, send: Send) -> None:
        """An object, or where it is."""
        if await self.artifacts.head(key) is None:
            raise Refused(Code.MOMENT_UNAVAILABLE, f"{key} is not in the artifact store")
        if self.artifacts.local is not None:
            await give_file(self.artifacts.local / key, scope, send)
            return
        link = await self.artifacts.link(key, lasts_s=LINK_S)
        if link is None:
            raise Unavailable(Code.ARTIFACTS_UNAVAILABLE, "the artifact store gives no links")
        await asgi.answer(send, 307, b"{}", headers=((b"location", link.encode()), (b"cache-control", b"no-store")))

    async def _manifest(self, digest: str) -> Manifest | None:
        """One of the store; None where there is none, or it is not what its name says. *Errors*: those of Artifacts."""
        known = self._known.get(digest)
        if known is not None:
            self._known.move_to_end(digest)
            return known
        try:
            content = await self.artifacts.read(key_of(MOMENTS, digest), bytes_max=MANIFEST_BYTES_MAX)
            manifest = await asyncio.to_thread(read_manifest, digest, content)
        except Refused as error:
            if error.code in (Code.ARTIFACT_NOT_FOUND, Code.MOMENT_CORRUPT, Code.BODY_TOO_LARGE):
                return None
            raise
        self._remember(manifest)
        return manifest

    def _remember(self, manifest: Manifest) -> None:
        self._known[manifest.digest] = manifest
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    # -- collecting

    async def run(self) -> None:
        """Collect now and then, until cancelled. Replicas may do so side by side."""
        while True:
            await asyncio.sleep(COLLECT_EVERY_S)
            try:
                await self.collect()
            except AtollError as error:
                LOG.warning(events.ARTIFACTS_NOT_COLLECTED, code=error.code, error=error.message)

    async def collect(self, *, dry_run: bool = False) -> Collected:
        """Remove moments and packs that nobody needs and that are old.

        *Errors*: those of Artifacts: then nothing more went. *Idempotency*: a second time finds nothing.
        """
        if await self.store.read(restoring.unsettled):
            # What is on no record may be what a host has, or has brought there since the backup.
            return Collected((), 0)
        old = self.now() - FRESH_S
        # Packs first: one that comes while the rest is read is not among them.
        packs = [info async for info in self.artifacts.list(PACKS) if info.changed_at < old]
        manifests = [info async for info in self.artifacts.list(MOMENTS)]
        receipts = {info.key.rpartition("/")[2]: info async for info in self.artifacts.list(RECEIPTS)}
        held = await self.store.read(lambda conn: sending.held(conn, receipts))
        wanted = await self.store.read(needed)
        wanted |= {digest for name in held if (digest := await self._receipt(name)) is not None}
        going = [info for name, info in receipts.items() if name not in held and info.changed_at < old]
        listed = {f"sha256:{info.key.rpartition('/')[2]}": info for info in manifests}
        going += [info for digest, info in listed.items() if digest not in wanted and info.changed_at < old]
        kept: set[str] = set()
        # Also what came after the listing, and is needed: it may stand on what an earlier moment of the same name had.
        for digest in {*wanted, *(digest for digest, info in listed.items() if info.changed_at >= old)}:
            manifest = await self._manifest(digest)
            if manifest is None and digest in wanted and digest in listed:
                # What it is made of cannot be told, and may be had again when the store is mended: nothing goes.
                LOG.warning(events.ARTIFACTS_NOT_COLLECTED, code=Code.MOMENT_CORRUPT, digest=digest)
                return Collected((), 0)
            kept |= set(manifest.packs) if manifest is not None else set()
        going += [info for info in packs if info.key.rpartition("/")[2] not in kept]
        if not dry_run:
            for info in going:
                await self.artifacts.delete(info.key)
                self._known.pop(f"sha256:{info.key.rpartition('/')[2]}", None)
        return Collected(tuple(sorted(info.key for info in going)), sum(info.size for info in going))


def _pack_key(name: str) -> str:
    return f"{PACKS}/{name}"
