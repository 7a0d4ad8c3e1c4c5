"""E2B's metrics of sandboxes: what they have used, as their hosts have measured it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.control.api.e2b import answers
from atoll.control.api.e2b.sandboxes import integer, not_found, sandbox_id
from atoll.control.api.exchange import Answer, Call, json_answer
from atoll.control.service import Service

IDS_MAX: Final = 100
_SECONDS_MAX: Final = 253402300799
_ID: Final = re.compile(r"[a-z0-9]{1,128}")


@dataclass(frozen=True, slots=True)
class Metrics:
    """The handlers."""

    service: Service

    async def one(self, call: Call) -> Answer:
        """The points of `start` to `end`, both included; without them, all that there are."""
        given, asked = sandbox_id(call), call.query()
        start = integer(asked, "start", default=0, low=0, high=_SECONDS_MAX)
        end = integer(asked, "end", default=_SECONDS_MAX, low=0, high=_SECONDS_MAX)
        if start > end:
            raise Refused(Code.INVALID_REQUEST, "start is after end")
        try:
            sandbox, points = await self.service.usage(call.caller, given)
        except Refused as error:
            raise (not_found(given) if error.code is Code.SANDBOX_NOT_FOUND else error) from error
        return json_answer(200, [answers.metric(sandbox, point) for point in points if start <= int(point.at) <= end])

    async def many(self, call: Call) -> Answer:
        """What each of some sandboxes uses now; those that do not run are not in the answer."""
        ids = [one.partition("-")[0] for one in call.query().get("sandbox_ids", "").split(",") if one]
        if not ids or len(ids) > IDS_MAX or len(set(ids)) != len(ids) or not all(_ID.fullmatch(one) for one in ids):
            raise Refused(Code.INVALID_REQUEST, f"sandbox_ids takes 1 to {IDS_MAX} different ids of sandboxes, separated by commas")
        found = await self.service.usages(call.caller, ids)
        return json_answer(200, {"sandboxes": {sandbox.id: answers.metric(sandbox, point) for sandbox, point in found}})
