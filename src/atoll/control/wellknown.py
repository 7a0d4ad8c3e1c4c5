"""The well-known document: /.well-known/atoll, answered to everybody, from memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from atoll.base.clock import Clock
from atoll.base.errors import Code, Refused
from atoll.control import asgi
from atoll.control.asgi import Receive, Scope, Send
from atoll.control.hosts.directory import Directory
from atoll.control.hosts.inspection import SKEW_S_MAX
from atoll.domain.host import LEASE_S, Admin
from atoll.wire import agent, wellknown
from atoll.wire.manifests import KeySet

PREFIX: Final = wellknown.PATH
_SLOTS_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Joining:
    """What an operator decides about hosts that join."""

    urls: tuple[str, ...] = ()
    """Where agents of other machines dial; empty: nobody has said, they dial where they read the document."""
    region: str = "local"
    ca_pem: str | None = None


@dataclass(frozen=True, slots=True)
class WellKnown:
    """ASGI for the document."""

    joining: Joining
    install_id: str
    version: str
    guest_public_key: str
    directory: Directory
    clock: Clock
    image_keys: Callable[[], KeySet] | None = None

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        await asgi.guarded(send, self._serve(scope, send))

    async def _serve(self, scope: Scope, send: Send) -> None:
        if scope["path"] != wellknown.PATH or scope["method"] != "GET":
            raise Refused(Code.INVALID_REQUEST, f"there is only GET {wellknown.PATH}")
        await asgi.answer_model(send, self.document())

    def document(self) -> wellknown.WellKnown:
        """As of now."""
        taken = {
            advert.host.registered.slots
            for advert in self.directory.adverts()
            if advert.host.registered is not None and advert.host.admin is not Admin.DISABLED
        }
        return wellknown.WellKnown(
            form=wellknown.FORM,
            install_id=self.install_id,
            version=self.version,
            region=self.joining.region,
            protocol=wellknown.ProtocolRange(min=agent.PROTOCOL, max=agent.PROTOCOL),
            agents_urls=list(self.joining.urls),
            rules=wellknown.HostRules(
                lease_s=LEASE_S,
                park_s_max=agent.POLL_PARK_S_MAX,
                clock_skew_s_max=SKEW_S_MAX,
                message_bytes_max=agent.MESSAGE_BYTES_MAX,
            ),
            keys=[wellknown.VerificationKey(use="guest-tokens", algorithm="Ed25519", public_key=self.guest_public_key)],
            image_keys=self.image_keys() if self.image_keys is not None else None,
            slots_taken=sorted(slots for slots in taken if slots)[:_SLOTS_MAX],
            ca_pem=self.joining.ca_pem,
            now=self.clock.now(),
        )
