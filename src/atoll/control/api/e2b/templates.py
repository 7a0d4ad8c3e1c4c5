"""E2B's template routes: builds, their logs, tags; what exists already is in `account.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.control.api.e2b import answers, build_answers, requests
from atoll.control.api.e2b.account import Account
from atoll.control.api.e2b.logs import LEVELS
from atoll.control.api.e2b.sandboxes import integer
from atoll.control.api.exchange import Answer, Call, json_answer
from atoll.control.api.moment import timestamp
from atoll.control.api.uploads import Uploads
from atoll.control.builds.builds import Builds
from atoll.domain.building import Build, BuildRequest, Recipe
from atoll.domain.template import Template
from atoll.planning.recipes import FILES_HASH

LINES_MAX: Final = 100
LAST_LINES: Final = 20
_MILLIS_MAX: Final = 10**15 - 1
_HOST: Final = re.compile(rb"[A-Za-z0-9.:\[\]_-]{1,256}")


@dataclass(frozen=True, slots=True)
class Templates:
    """The handlers."""

    account: Account
    builds: Builds
    uploads: Uploads

    async def request(self, call: Call) -> Answer:
        template, build = await self._request(call)
        return json_answer(
            202,
            {
                "templateID": template.id,
                "buildID": build.id,
                "public": template.public,
                "aliases": list(template.aliases),
                "names": answers.names(template),
                "tags": list(build.tags),
            },
        )

    async def request_v2(self, call: Call) -> Answer:
        return self._legacy(*await self._request(call))

    async def request_v1(self, call: Call) -> Answer:
        """A build of an image that the client will push to `e2b/custom-envs/TEMPLATE:BUILD`; the oldest form, with a Dockerfile for show."""
        body = call.json(requests.PushedBuild)
        requests.refuse_unknown(body)
        if body.team_id and body.team_id != call.caller.team.id:
            raise Refused(Code.FORBIDDEN, "this key is not of that team")
        if known := call.params.get("templateID"):
            template = await self.account.find(call, known)
            if template.team_id != call.caller.team.id:
                raise Refused(Code.FORBIDDEN, "this template is not of the key's team")
            name = template.name
        elif body.alias:
            name = body.alias
        else:
            raise Refused(Code.INVALID_REQUEST, "alias is missing: a template needs a name")
        asked = BuildRequest(
            name=name,
            cpu_millis=None if body.cpu_count is None else body.cpu_count * 1000,
            memory_mib=body.memory_mb,
            pushed=Recipe(start_command=body.start_cmd or None, ready_command=body.ready_cmd or None),
        )
        return self._legacy(*await self.builds.request(call.caller, asked))

    async def start_v1(self, call: Call) -> Answer:
        await self.builds.start_pushed(call.caller, call.params["templateID"], call.params["buildID"])
        return Answer(202)

    def _legacy(self, template: Template, build: Build) -> Answer:
        shown = answers.template(template, status=build_answers.STATUS[build.state])
        return json_answer(
            202, {**{name: value for name, value in shown.items() if name not in ("names", "buildStatus")}, "buildID": build.id}
        )

    async def _request(self, call: Call) -> tuple[Template, Build]:
        body = call.json(requests.NewBuild)
        requests.refuse_unknown(body)
        name = body.name or body.alias
        if name is None:
            raise Refused(Code.INVALID_REQUEST, "name is missing")
        if body.team_id and body.team_id != call.caller.team.id:
            raise Refused(Code.FORBIDDEN, "this key is not of that team")
        asked = BuildRequest(
            name=name,
            tags=tuple(body.tags or ()),
            cpu_millis=None if body.cpu_count is None else body.cpu_count * 1000,
            memory_mib=body.memory_mb,
            disk_mib=body.min_free_disk_mb or None,
        )
        return await self.builds.request(call.caller, asked)

    async def file(self, call: Call) -> Answer:
        """Where to send what a COPY copies, whether or not it was sent before: clients may want to send it again."""
        template = await self.account.find(call, call.params["templateID"])
        files_hash = call.params["hash"]
        if FILES_HASH.fullmatch(files_hash) is None:
            raise Refused(Code.INVALID_REQUEST, "the hash of files is a SHA-256, 64 hexadecimal digits")
        if template.team_id != call.caller.team.id:
            raise Refused(Code.FORBIDDEN, "this template is not of the key's team")
        team_id = call.caller.team.id
        url = self.uploads.link(team_id, files_hash, origin=_origin(call))
        return json_answer(201, {"present": await self.uploads.present(team_id, files_hash), "url": url})

    async def start(self, call: Call) -> Answer:
        body = call.json(requests.BuildStart)
        recipe = requests.recipe(body)
        credentials = requests.registry_credentials(body.from_image_registry)
        secrets = requests.secrets(body)
        await self.builds.start(call.caller, call.params["templateID"], call.params["buildID"], recipe, credentials, secrets)
        return Answer(202)

    async def status(self, call: Call) -> Answer:
        asked = call.query()
        offset = integer(asked, "logsOffset", default=0, low=0, high=2**31 - 1)
        limit = integer(asked, "limit", default=LINES_MAX, low=0, high=LINES_MAX)
        build = await self.builds.get(call.caller, call.params["templateID"], call.params["buildID"])
        lines = await self.builds.log(build, levels=_levels(asked.get("level")), offset=offset, limit=limit)
        return json_answer(200, build_answers.build_info(build, lines, await self.builds.why(build, limit=LAST_LINES)))

    async def logs(self, call: Call) -> Answer:
        asked = call.query()
        limit = integer(asked, "limit", default=LINES_MAX, low=0, high=LINES_MAX)
        direction = asked.get("direction") or "forward"
        if direction not in ("forward", "backward"):
            raise Refused(Code.INVALID_REQUEST, "direction is forward or backward")
        if asked.get("source", "") not in ("", "temporary", "persistent"):
            raise Refused(Code.INVALID_REQUEST, "source is temporary or persistent")
        backward = direction == "backward"
        cursor_ms = integer(asked, "cursor", default=_MILLIS_MAX if backward else 0, low=0, high=_MILLIS_MAX)
        build = await self.builds.get(call.caller, call.params["templateID"], call.params["buildID"])
        lines = await self.builds.log(build, levels=_levels(asked.get("level")))
        if backward:
            kept = [line for line in reversed(lines) if line.at * 1000 <= cursor_ms]
        else:
            kept = [line for line in lines if line.at * 1000 >= cursor_ms]
        return json_answer(200, {"logs": [build_answers.build_line(line) for line in kept[:limit]]})

    async def assign_tags(self, call: Call) -> Answer:
        body = call.json(requests.TagsOf)
        if body.target is None:
            raise Refused(Code.INVALID_REQUEST, "target is missing")
        build = await self.builds.assign(call.caller, body.target, body.tags)
        return json_answer(201, {"tags": body.tags, "buildID": build.id})

    async def remove_tags(self, call: Call) -> Answer:
        body = call.json(requests.TagsOf)
        if body.name is None:
            raise Refused(Code.INVALID_REQUEST, "name is missing")
        await self.builds.remove_tags(call.caller, body.name, body.tags)
        return Answer(204)

    async def tags(self, call: Call) -> Answer:
        found = await self.builds.tags(call.caller, call.params["templateID"])
        return json_answer(200, [{"tag": one.name, "buildID": one.build_id, "createdAt": timestamp(one.assigned_at)} for one in found])

    async def count_tags(self, call: Call) -> Answer:
        return json_answer(200, {"total": len(await self.builds.tags(call.caller, call.params["templateID"]))})

    async def tag_exists(self, call: Call) -> Answer:
        wanted = (call.query().get("tag") or "").strip().lower()
        if not wanted:
            raise Refused(Code.INVALID_REQUEST, "tag is missing")
        known = {one.name for one in await self.builds.tags(call.caller, call.params["templateID"])}
        return json_answer(200, {"exists": wanted in known, "normalizedTag": wanted})

    async def change(self, call: Call) -> Answer:
        await self._change(call)
        return json_answer(200, {})

    async def change_v2(self, call: Call) -> Answer:
        return json_answer(200, {"names": answers.names(await self._change(call))})

    async def _change(self, call: Call) -> Template:
        body = call.json(requests.TemplateChange)
        requests.refuse_unknown(body)
        template = await self.account.find(call, call.params["templateID"])
        if body.public is None:
            return template
        return await self.builds.set_public(call.caller, template.id, public=body.public)


def _levels(lowest: str | None) -> Sequence[str] | None:
    """All levels from this one up; None: any."""
    if not lowest:
        return None
    if lowest not in LEVELS:
        raise Refused(Code.INVALID_REQUEST, f"level is one of {', '.join(LEVELS)}")
    return LEVELS[LEVELS.index(lowest) :]


def _origin(call: Call) -> str:
    """How the client reaches us: as it says itself, or as the edge says of it."""
    host = call.headers.get(b"x-forwarded-host") or call.headers.get(b"host") or b""
    scheme = call.headers.get(b"x-forwarded-proto", b"http")
    if _HOST.fullmatch(host) is None or scheme not in (b"http", b"https"):
        raise Refused(Code.INVALID_REQUEST, "the request does not say which host it is for")
    return f"{scheme.decode()}://{host.decode()}"
