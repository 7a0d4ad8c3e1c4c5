"""From what control wants of a placement to the command, end and payload that its agent gets.

A command's content follows from rows that do not change under one desired revision, so whoever computes it, whenever, gets the same
id and digest. A payload that holds what somebody has brought leaves only when its guest is there to take it (`deliveries.py`).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from atoll.base.clock import Clock
from atoll.base.errors import Code, Refused
from atoll.base.records import replace
from atoll.control.tokens import Tokens
from atoll.domain.command import Kind, command_id, digest
from atoll.domain.placement import Placement
from atoll.domain.sandbox import Sandbox
from atoll.domain.spec import SaveMode
from atoll.planning import keeping
from atoll.planning.claiming import CLAIMED
from atoll.planning.storing import RESUMED
from atoll.store import payloads, rows
from atoll.store.engine import Store
from atoll.store.payloads import Sealed
from atoll.store.sealing import Sealer
from atoll.wire import agent as wire
from atoll.wire.guest import SCOPE_CONTROL

_MODES: Final = frozenset(mode.value for mode in SaveMode)
TABLE = "payloads"
PAYLOAD_BYTES_MAX: Final = 128 * 1024
"""Of one payload as it travels: it fits into a message with its command (256 KiB), and with the rest of a poll's answer."""


class Orders:
    """Makes messages for agents."""

    def __init__(self, *, store: Store, sealer: Sealer, tokens: Tokens, clock: Clock) -> None:
        self._store = store
        self.sealer = sealer
        self._tokens = tokens
        self.clock = clock

    def seal(self, sandbox_id: str, *, env: dict[str, str], files: list[dict[str, str]], exposes: bool) -> tuple[Sealed, str]:
        """The sealed payload of a new sandbox, and its digest. `exposes`: somebody has brought values of his own. *Errors*: Refused CLASS_LIMIT when no message could carry it."""
        size = len(wire.InitPayload(env=env, files=files).model_dump_json())
        if size > PAYLOAD_BYTES_MAX:
            raise Refused(
                Code.CLASS_LIMIT, f"environment and files have {size} bytes as they travel, at most {PAYLOAD_BYTES_MAX} are allowed"
            )
        clear = json.dumps({"env": env, "files": files}, sort_keys=True, separators=(",", ":")).encode()
        sealed = Sealed(self.sealer.seal(clear, table=TABLE, row=sandbox_id), exposes)
        return sealed, hashlib.sha256(clear).hexdigest()

    def open(self, sandbox: Sandbox, sealed: Sealed) -> wire.InitPayload:
        """What the sandbox's guest gets by init."""
        clear = json.loads(self.sealer.open(sealed.content, table=TABLE, row=sandbox.id))
        token = self._tokens.access(sandbox.id) if sandbox.secured else None
        return wire.InitPayload(env=clear["env"], files=clear["files"], access_token=token)

    async def command(self, placement: Placement, sandbox: Sandbox, *, epoch: str) -> tuple[wire.Command, wire.InitPayload | None]:
        """The placement's one current command, with the payload that it refers to where that may travel beside it."""
        content: dict[str, Any] = {
            "id": command_id(placement.id, placement.generation, placement.desired_revision),
            "kind": placement.desired.value,
            "placement_id": placement.id,
            "sandbox_id": sandbox.id,
            "team_id": sandbox.team_id,
            "generation": placement.generation,
            "desired_revision": placement.desired_revision,
            "reason": placement.desired_reason,
        }
        payload: wire.InitPayload | None = None
        if placement.desired is not Kind.ENSURE_ABSENT:
            spec = keeping.begins_with(sandbox.spec, generation=placement.generation)
            if placement.origin_moment is not None and spec.origin is not None:
                spec = replace(spec, origin=replace(spec.origin, moment=placement.origin_moment))
            sealed = await self._store.read(lambda conn: payloads.get(conn, sandbox.id))
            payload = self.open(sandbox, sealed) if sealed is not None and not sealed.exposes else None
            content |= {
                "spec": rows.spec_values(spec),
                "nonce": placement.nonce,
                "guest_public_key": self._tokens.guest_public_key,
                "guest_token": self._tokens.guest(placement, SCOPE_CONTROL),
                "hostname": sandbox.id,
                "payload_ref": sandbox.id,
                "payload_digest": sandbox.payload_digest,
                "ready_s": sandbox.spec.ready_s,
                "timeout_s": _life_s(placement, sandbox),
            }
        if placement.desired is Kind.ENSURE_RUNNING and placement.desired_reason == RESUMED and sandbox.save_mode is not None:
            content["save_mode"] = sandbox.save_mode.value
        if placement.desired is Kind.ENSURE_RUNNING and placement.desired_reason == CLAIMED:
            content["claimed"] = True
        if placement.desired is Kind.ENSURE_SUSPENDED:
            mode, _, strict = (placement.desired_reason or "").partition(" ")
            # Another reason than a mode: it is to stay as it was, and what is saved of it already says what that is.
            content |= {"save_mode": mode if mode in _MODES else SaveMode.FULL.value, "strict": strict == "strict"}
        beside = {"digest": digest(content), "epoch": epoch, "carried_out": placement.applied_revision >= placement.desired_revision}
        if placement.desired is Kind.ENSURE_RUNNING and placement.moment is not None and sandbox.moment is not None:
            # Only as long as nothing newer can be known: a guest that was seen ready makes it the past.
            beside |= {"moment": placement.moment} if placement.moment == sandbox.moment.digest else {}
        return wire.Command.model_validate({**content, **beside}), payload

    def guest_token(self, placement: Placement) -> str:
        """What the agent shows to the placement's guest."""
        return self._tokens.guest(placement, SCOPE_CONTROL)

    def end(self, sandbox: Sandbox, placement_id: str, *, since: float | None = None) -> wire.End:
        """When the agent ends it by itself; remaining seconds, never less than none. `since`: when the request came that this answers."""
        counted_from = self.clock.now() if since is None else since
        left = (sandbox.end_at if sandbox.end_at is not None else float("inf")) - counted_from
        return wire.End(
            placement_id=placement_id,
            revision=sandbox.end_revision,
            remaining_s=max(0.0, left),
            action=sandbox.spec.on_end,
            on_lease_expiry=sandbox.spec.on_lease_expiry,
        )


def _life_s(placement: Placement, sandbox: Sandbox) -> float | None:
    """How long its guest lives from when it is ready; None: a restart in place keeps the end that there is. *Units*: seconds."""
    whole = float(sandbox.spec.timeout_s)
    if placement.desired_reason == RESUMED:
        return sandbox.life_s if sandbox.life_s is not None else whole
    return whole if placement.desired_revision == 1 or placement.desired_reason == CLAIMED else None
