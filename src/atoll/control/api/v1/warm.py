"""`/v1/templates/{reference}/warm` and `/v1/warm`: how many guests are kept ready."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Path, Response
from pydantic import Field

from atoll.control.api.v1 import answers
from atoll.control.api.v1.context import FAILURES, Who, respond
from atoll.control.api.v1.models import Incoming, Outgoing, Size, SizeRequest, like
from atoll.control.service import Service, WarmView
from atoll.domain.warmth import COUNT_MAX
from atoll.planning.resolve import CreateRequest

Reference = Annotated[str, Path(max_length=256)]


class KeepWarm(Incoming):
    """How many guests of a template are kept ready, in one size and class; what is left out is as for a create. 0: none any more."""

    model_config = like({"count": 4}, {"count": 2, "size": {"memoryMib": 1024}, "class": "default"})

    count: Annotated[int, Field(ge=0, le=COUNT_MAX)]
    size: SizeRequest = Field(default_factory=SizeRequest)
    class_name: Annotated[str | None, Field(alias="class", max_length=64)] = None


class WarmPolicy(Outgoing):
    """What is kept ready of one template, class and size. `problem`: why there are fewer than `count`, where that is known."""

    template_id: str
    template: str
    class_name: Annotated[str, Field(alias="class")]
    size: Size
    count: int
    ready: int
    starting: int
    revision: int
    updated_at: str
    short_since: str | None
    problem: str | None


class WarmPolicyList(Outgoing):
    items: list[WarmPolicy]


@dataclass(frozen=True, slots=True)
class WarmApi:
    """The handlers and their routes."""

    service: Service

    def router(self) -> APIRouter:
        """The routes."""
        router = APIRouter(prefix="/v1", responses=FAILURES)
        for method, path, handler, operation_id, model in (
            ("GET", "/warm", self.all, "listWarm", WarmPolicyList),
            ("PUT", "/templates/{reference}/warm", self.put, "keepWarm", WarmPolicy),
        ):
            router.add_api_route(path, handler, methods=[method], operation_id=operation_id, response_model=model, tags=["templates"])
        return router

    async def all(self, caller: Who) -> Response:
        """What is kept ready, and how well; for operators."""
        return respond(200, {"items": [answer(one) for one in await self.service.warm_policies(caller)]})

    async def put(self, caller: Who, reference: Reference, body: KeepWarm) -> Response:
        """Keep so many guests of a template ready, for creates to take over; for operators."""
        size = body.size
        asked = CreateRequest(
            class_name=body.class_name, cpu_millis=size.cpu_millis, memory_mib=size.memory_mib, disk_mib=size.disk_mib, template=reference
        )
        return respond(200, answer(await self.service.keep_warm(caller, reference, asked, count=body.count)))


def answer(view: WarmView) -> dict[str, Any]:
    """A policy as `/v1` shows it."""
    policy = view.policy
    return {
        "templateId": policy.template_id,
        "template": view.template,
        "class": policy.class_name,
        "size": {"cpuMillis": policy.cpu_millis, "memoryMib": policy.memory_mib, "diskMib": policy.disk_mib},
        "count": policy.count,
        "ready": view.ready,
        "starting": view.starting,
        "revision": policy.revision,
        "updatedAt": answers.timestamp(policy.updated_at),
        "shortSince": answers.timestamp(policy.short_since),
        "problem": policy.problem,
    }
