"""E2B's templates, teams and API keys: what a caller's team has."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.control.api.e2b import answers, build_answers, requests
from atoll.control.api.e2b.sandboxes import PAGE_MAX, integer
from atoll.control.api.exchange import Answer, Call, Headers, json_answer
from atoll.control.builds.builds import Builds
from atoll.control.service import Service
from atoll.domain.building import State
from atoll.domain.template import Template

_REFERENCE_LENGTH_MAX: Final = 256


def _cursor(template: Template) -> str:
    return base64.urlsafe_b64encode(f"{template.created_at!r}__{template.id}".encode()).decode().rstrip("=")


def _read_cursor(token: str) -> tuple[float, str]:
    try:
        at, _, given = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode().partition("__")
        return float(at), given
    except (ValueError, binascii.Error) as error:
        raise Refused(Code.INVALID_REQUEST, "nextToken is not one of ours") from error


@dataclass(frozen=True, slots=True)
class Account:
    """The handlers."""

    service: Service
    builds: Builds | None = None
    """None: nothing is built here."""

    async def templates_v1(self, call: Call) -> Answer:
        return json_answer(200, await self._shown(call, await self._templates(call)))

    async def templates_v2(self, call: Call) -> Answer:
        asked = call.query()
        limit = integer(asked, "limit", default=PAGE_MAX, low=1, high=PAGE_MAX)
        found = await self._templates(call)
        token = asked.get("nextToken")
        if token:
            last = _read_cursor(token)
            found = [one for one in found if (one.created_at, one.id) < last]
        headers: Headers = ()
        if len(found) > limit:
            headers = ((b"x-next-token", _cursor(found[limit - 1]).encode()),)
        return json_answer(200, await self._shown(call, found[:limit]), headers)

    async def defaults(self, call: Call) -> Answer:
        """What everybody may use without having built it: ready-made templates, which are no team's."""
        return json_answer(200, await self._shown(call, [one for one in await self._templates(call) if one.team_id is None]))

    async def _shown(self, call: Call, templates: Sequence[Template]) -> list[answers.Json]:
        built = {} if self.builds is None else await self.builds.summary(call.caller)
        shown = []
        for one in templates:
            count, state = built.get(one.id, (1, State.READY))
            shown.append(answers.template(one, builds=count, status=build_answers.STATUS[state]))
        return shown

    async def _templates(self, call: Call) -> list[Template]:
        """Newest first."""
        team = call.query().get("teamID")
        if team and team != call.caller.team.id:
            raise Refused(Code.FORBIDDEN, "this key is not of that team")
        return sorted(await self.service.templates(call.caller), key=lambda one: (one.created_at, one.id), reverse=True)

    async def template(self, call: Call) -> Answer:
        found = await self.find(call, call.params["templateID"])
        own = self.builds is not None and found.team_id == call.caller.team.id
        builds = await self.builds.of_template(found) if self.builds is not None and own else ()
        return json_answer(200, answers.template_with_builds(found, [build_answers.build(one) for one in builds]))

    async def alias(self, call: Call) -> Answer:
        found = await self.find(call, call.params["alias"])
        return json_answer(200, {"templateID": found.id, "public": found.public})

    async def find(self, call: Call, reference: str) -> Template:
        """The template that a path names. *Errors*: INVALID_REQUEST, TEMPLATE_NOT_FOUND."""
        if len(reference) > _REFERENCE_LENGTH_MAX:
            raise Refused(Code.INVALID_REQUEST, f"a template's name has at most {_REFERENCE_LENGTH_MAX} characters")
        try:
            return await self.service.template(call.caller, reference)
        except Refused as error:
            if error.code is Code.TEMPLATE_NOT_FOUND:
                raise Refused(Code.TEMPLATE_NOT_FOUND, f'template "{reference}" was not found') from error
            raise

    async def teams(self, call: Call) -> Answer:
        """The one team of the key. `apiKey` is the key that was shown: no other is known in clear."""
        team = call.caller.team
        return json_answer(200, [{"teamID": team.id, "name": team.name, "apiKey": call.key, "isDefault": True}])

    async def keys(self, call: Call) -> Answer:
        found = [one for one in await self.service.keys(call.caller) if one.revoked_at is None]
        return json_answer(200, [answers.api_key(one) for one in found])

    async def create_key(self, call: Call) -> Answer:
        body = call.json(requests.NewKey)
        requests.refuse_unknown(body)
        made = await self.service.create_key(call.caller, name=body.name)
        return json_answer(201, {**answers.api_key(made.client), "key": made.key.reveal()})

    async def revoke_key(self, call: Call) -> Answer:
        """By E2B's id of a key or by ours."""
        given = call.params["apiKeyID"]
        for one in await self.service.keys(call.caller):
            if given in (one.id, answers.key_id(one)) and one.revoked_at is None:
                await self.service.revoke_key(call.caller, one.id)
                return Answer(204)
        raise Refused(Code.KEY_NOT_FOUND, f'API key "{given}" was not found')
