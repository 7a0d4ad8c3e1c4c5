"""What an instance brings along before anybody can call its API: the first key, an enrolment token (digests only), ready templates."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from pydantic import BaseModel, ConfigDict, Field

from atoll.base.clock import Clock
from atoll.base.errors import Code
from atoll.base.ids import Dice, Prefix, TemplateId, new_id
from atoll.control.hosts.enrollment import Enrollment
from atoll.control.keys import Keys
from atoll.domain.template import Template
from atoll.store import schema, tenancy
from atoll.store.engine import Store
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger

LOG = get_logger()

DEFAULT_TEAM: Final = "default"


class Bootstrap(BaseModel):
    """control/bootstrap.json."""

    model_config = ConfigDict(extra="ignore")

    operator_key_digest: str | None = None
    operator_key_hint: str = ""
    enrollment_token_digest: str | None = None
    host_name: str = "local"


class Manifest(BaseModel):
    """The part of an image's manifest that control registers a template from."""

    model_config = ConfigDict(extra="ignore")

    name: str
    digest: str
    cpu_millis: int = 1000
    memory_mib: int = 512
    disk_mib: int = 2048
    default_user: str = "user"
    default_workdir: str | None = None
    aliases: list[str] = Field(default_factory=list)


async def apply(path: Path, *, keys: Keys, enrollment: Enrollment) -> None:
    """Take in what the file says. *Idempotency*: what is known already stays as it is."""
    if not path.exists():
        return
    brought = Bootstrap.model_validate_json(path.read_bytes())
    if brought.operator_key_digest is not None:
        await keys.ensure_operator(digest=brought.operator_key_digest, hint=brought.operator_key_hint, team=DEFAULT_TEAM)
    if brought.enrollment_token_digest is not None:
        await enrollment.admit_token(brought.enrollment_token_digest, host_name=brought.host_name)


async def register_templates(artifacts: Path, *, store: Store, clock: Clock, dice: Dice) -> None:
    """Everybody's templates from `<artifacts>/<name>/current/manifest.json`; a new digest is a new build of the same template.

    A damaged one is told and left out: what was registered of it before stays, and the hosts say IMAGE_CORRUPT when it is asked for.
    """
    for path in sorted(artifacts.glob("*/current/manifest.json")):
        try:
            manifest = Manifest.model_validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            LOG.error(names.TEMPLATE_REFUSED, path=str(path), code=Code.IMAGE_CORRUPT, error=str(error))  # noqa: TRY400 - the message is all of it
            continue
        await store.write(lambda conn, manifest=manifest: _register(conn, manifest, clock=clock, dice=dice))  # type: ignore[misc]


def _register(conn: sa.Connection, manifest: Manifest, *, clock: Clock, dice: Dice) -> None:
    schema.alone(conn)
    now = clock.now()
    known = next((t for t in tenancy.templates_for(conn, "") if t.team_id is None and t.name == manifest.name), None)
    if known is not None and known.image == manifest.digest:
        return
    template = Template(
        id=known.id if known else TemplateId(new_id(Prefix.TEMPLATE, dice).removeprefix(Prefix.TEMPLATE)),
        team_id=None,
        name=manifest.name,
        aliases=(manifest.name, *manifest.aliases),
        public=True,
        build_id=str(uuid.UUID(bytes=dice(16), version=4)),
        image=manifest.digest,
        cpu_millis=manifest.cpu_millis,
        memory_mib=manifest.memory_mib,
        disk_mib=manifest.disk_mib,
        default_user=manifest.default_user,
        default_workdir=manifest.default_workdir,
        created_at=known.created_at if known else now,
        updated_at=now,
    )
    tenancy.put_template(conn, template)
    LOG.info(names.TEMPLATE_REGISTERED, name=manifest.name, image=manifest.digest)
