"""`/v1/hosts/{name}/...`: what operators do so that a machine becomes, or becomes again, a host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Path, Response

from atoll.base.units import Vector
from atoll.control.api.v1 import answers, host_models
from atoll.control.api.v1.context import FAILURES, Who, respond
from atoll.control.service import Service
from atoll.domain.host import AdminEvent
from atoll.wire import agent as wire

Reference = Annotated[str, Path(max_length=256)]
Name = Annotated[str, Path(min_length=1, max_length=wire.HOST_NAME_MAX)]


@dataclass(frozen=True, slots=True)
class HostsApi:
    """The handlers and their routes."""

    service: Service

    def router(self) -> APIRouter:
        """The routes."""
        router = APIRouter(prefix="/v1/hosts", responses=FAILURES)
        for method, path, handler, operation_id in (
            ("PUT", "/{name}/registration", self.register, "registerHost"),
            ("POST", "/{reference}/reset", self.reset, "resetHost"),
            ("POST", "/{reference}/recount", self.recount, "recountHost"),
        ):
            router.add_api_route(
                path, handler, methods=[method], operation_id=operation_id, response_model=host_models.Host, tags=["hosts"]
            )
        return router

    async def register(self, caller: Who, name: Name, body: host_models.NewHost) -> Response:
        """Register a machine as a host, without a token; for operators. The same again changes nothing."""
        return respond(200, answers.host(await self.service.register_host(caller, _registration(name, body))))

    async def reset(self, caller: Who, reference: Reference) -> Response:
        """Let a disabled machine enrol anew, once nothing of it counts as being there; for operators."""
        return respond(200, answers.host(await self.service.set_host_admin(caller, reference, AdminEvent.RESET)))

    async def recount(self, caller: Who, reference: Reference) -> Response:
        """Reckon the host's capacity anew from what its machine has now, with the reserve and overcommit that were registered; for operators."""
        return respond(200, answers.host(await self.service.recount_host(caller, reference)))


def _registration(name: str, body: host_models.NewHost) -> wire.Registration:
    over, has = body.overcommit, body.inventory
    return wire.Registration(
        name=name,
        capacity=_vector(body.capacity),
        facts=wire.HostFacts(arch=body.arch, cpu_count=has.cpu_count, memory_mib=has.memory_mib, disk_mib=has.disk_mib),
        reserve=_vector(body.reserve),
        overcommit=wire.Overcommit(cpu=over.cpu, memory=over.memory, disk=over.disk),
        slots=body.slots,
        region=body.region,
        labels=body.labels,
        credential_digest=body.credential_digest,
    )


def _vector(amount: host_models.AmountRequest) -> Vector:
    return Vector(amount.cpu_millis, amount.memory_mib, amount.disk_mib, amount.slots)
