"""Templates by reference, and the ready-made ones that a host's image cache brings."""

from __future__ import annotations

import re
from typing import Final

import sqlalchemy as sa

from atoll.base.errors import Code, Refused
from atoll.control.service import Caller
from atoll.domain.template import Template
from atoll.store import tenancy
from atoll.store.engine import Store

_REFERENCE: Final = re.compile(
    r"(?:(?P<namespace>[a-z0-9][a-z0-9_-]{0,127})/)?(?P<name>[A-Za-z0-9][A-Za-z0-9_-]{0,127})(?::(?P<tag>[a-z0-9._-]{1,128}))?"
)
_DEFAULT_TAG: Final = "default"


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

        name, namespace, tag = parsed["name"], parsed["namespace"], parsed["tag"] or _DEFAULT_TAG
        for template in await self._store.read(work):
            named = name in (template.id, template.name, *template.aliases)
            in_namespace = namespace is None or namespace == caller.team.name
            if named and in_namespace and tag == _DEFAULT_TAG:
                return template
        raise Refused(Code.TEMPLATE_NOT_FOUND, f"template {reference[:128]!r} was not found")
