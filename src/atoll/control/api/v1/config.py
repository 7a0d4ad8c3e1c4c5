"""`/v1/config`: the deployment document, for operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import APIRouter, Path, Query, Response

from atoll.control.api.v1 import answers, models
from atoll.control.api.v1.context import FAILURES, Who, respond
from atoll.control.service import Service

Revision = Annotated[int, Path(ge=0, le=models.INT32_MAX)]
PAGE_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class Config:
    """The handlers and their routes."""

    service: Service

    def router(self) -> APIRouter:
        """The routes."""
        router = APIRouter(prefix="/v1/config", tags=["config"], responses=FAILURES)
        add = router.add_api_route
        add("", self.show, methods=["GET"], operation_id="getConfig", response_model=models.Config)
        add("", self.apply, methods=["PUT"], operation_id="applyConfig", response_model=models.Config)
        add("/check", self.check, methods=["POST"], operation_id="checkConfig", response_model=models.CheckedConfig)
        add("/revisions", self.history, methods=["GET"], operation_id="listConfigRevisions", response_model=models.ConfigList)
        add("/revisions/{revision}", self.revision, methods=["GET"], operation_id="getConfigRevision", response_model=models.Config)
        return router

    async def show(self, caller: Who) -> Response:
        """The document that applies."""
        return respond(200, answers.config(await self.service.config(caller)))

    async def apply(self, caller: Who, body: models.NewConfig) -> Response:
        """Apply a document in the place of the one at `revision`. Sandboxes that there are keep what they were made with.

        409 when another one applies meanwhile. The same document sent again for the same revision gives the same answer.
        """
        return respond(200, answers.config(await self.service.apply_config(caller, body.document, revision=body.revision)))

    async def check(self, caller: Who, body: models.ConfigText) -> Response:
        """Read a document without applying it: everything that is wrong with it, or what it would change."""
        return respond(200, answers.checked_config(await self.service.check_config(caller, body.document)))

    async def history(
        self,
        caller: Who,
        before: Annotated[int | None, Query(ge=1, le=models.INT32_MAX, description="Only those below it")] = None,
        limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 20,
    ) -> Response:
        """Every document that was applied, newest first."""
        found = await self.service.config_history(caller, before=before, limit=limit)
        last = found[-1].revision if found else 0
        return respond(
            200,
            {"items": [answers.config(one) for one in found], "nextBefore": last if len(found) == limit and last > 1 else None},
        )

    async def revision(self, caller: Who, revision: Revision) -> Response:
        """One revision, for as long as the deployment exists."""
        return respond(200, answers.config(await self.service.config(caller, revision)))
