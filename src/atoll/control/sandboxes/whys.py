"""Why a sandbox is where it is, or nowhere: placing explained, for a sandbox that there is and for one that somebody thinks of.

Members hear how many hosts each filter removes; which hosts those are, and what is free on them, is the operators'.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.base.clock import Clock
from atoll.base.errors import Code, Refused
from atoll.base.ids import Prefix, is_id
from atoll.control.artifacts.templates import Templates
from atoll.control.configuration import Configuration
from atoll.control.hosts.directory import Directory
from atoll.control.service import Caller, Why
from atoll.planning import keeping, placing, resolve, storing
from atoll.planning.resolve import CreateRequest
from atoll.store import sandboxes, snapshots
from atoll.store.engine import Store


@dataclass(slots=True, kw_only=True)
class Whys:
    """Part of the Service."""

    store: Store
    clock: Clock
    directory: Directory
    templates: Templates
    configuration: Configuration

    async def of_sandbox(self, caller: Caller, sandbox_id: str) -> Why:
        """As Service.why."""
        found = await self.store.read(lambda conn: sandboxes.get(conn, sandbox_id)) if is_id(Prefix.SANDBOX, sandbox_id) else None
        if found is None or (found.team_id != caller.team.id and not caller.operator):
            raise Refused(Code.SANDBOX_NOT_FOUND, f"sandbox {sandbox_id[:64]!r} was not found")
        spec = storing.sought(found)
        if found.spec.origin is not None and not found.rests_in_store:
            origin = found.spec.origin
            snapshot = await self.store.read(lambda conn: snapshots.get(conn, origin.snapshot_id))
            # The last is the one that leaves nobody out.
            spec = keeping.sought(spec, snapshot, generation=found.generation)[-1]
        told = placing.explain(
            self.directory.adverts(),
            spec,
            sandbox_id=found.id,
            now=self.clock.now(),
            excluded=found.tried_hosts,
            holds=found.host_id if found.placement_id is not None else None,
        )
        return Why(found.spec, told, found, shows_hosts=caller.operator)

    async def of_request(self, caller: Caller, request: CreateRequest) -> Why:
        """As Service.why_request."""
        policy = resolve.class_of(request, self.configuration.current)
        template = await self.templates.get(caller, resolve.template_of(request, policy))
        spec = resolve.resolve(request, template=template, policy=policy)
        spec = self.directory.on_its_rung(spec, policy.rungs(), now=self.clock.now())
        told = placing.explain(self.directory.adverts(), spec, sandbox_id="", now=self.clock.now())
        return Why(spec, told, None, shows_hosts=caller.operator)
