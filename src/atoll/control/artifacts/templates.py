"""Templates by reference, and the ready-made ones that a host's image cache brings."""

from __future__ import annotations

import re
from typing import Final

import sqlalchemy as sa

from atoll.base.errors import Code, Refused
from atoll.control.service import Caller
from atoll.domain.building import DEFAULT_TAG, version
from atoll.domain.template import Template
from atoll.store import builds, tenancy
from atoll.store.engine import Store

_REFERENCE: Final = re.compile(
    r"(?:(?P<namespace>[a-z0-9][a-z0-9_-]{0,127})/)?(?P<name>[A-Za-z0-9][A-Za-z0-9_-]{0,127})(?::(?P<tag>[a-z0-9._-]{1,128}))?"
)


class Templates:
    """Part of the Service."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def all(self, caller: Caller) -> list[Template]:
        """What the caller's team may use."""
        return list(await self._store.read(lambda conn: tenancy.templates_for(conn, caller.team.id)))

    async def get(self, caller: Caller, reference: str) -> Template:
        """By id, alias or `namespace/alias[:tag]`. *Errors*: Refused INVALID_REQUEST, TEMPLATE_NOT_FOUND."""
        parsed = _REFERENCE.fullmatch(reference)
        if parsed is None:
            raise Refused(Code.INVALID_REQUEST, f"{reference[:128]!r} is not a template reference ([namespace/]name[:tag])")

        def work(conn: sa.Connection) -> list[Template]:
            return list(tenancy.templates_for(conn, caller.team.id))

        name, namespace, tag = parsed["name"], parsed["namespace"], parsed["tag"] or DEFAULT_TAG
        for template in await self._store.read(work):
            named = name in (template.id, template.name, *template.aliases)
            in_namespace = namespace is None or namespace == caller.team.name
            if named and in_namespace:
                found = template if tag == DEFAULT_TAG else await self._tagged(template, tag)
                if found is not None:
                    return found
        raise Refused(Code.TEMPLATE_NOT_FOUND, f"template {reference[:128]!r} was not found")

    async def _tagged(self, template: Template, tag: str) -> Template | None:
        """The template as the build that a tag names has made it; None when it names none."""
        build = await self._store.read(lambda conn: builds.tagged(conn, template.id, tag))
        if build is None or build.result is None:
            return None
        return version(template, build, build.result, now=template.updated_at)
