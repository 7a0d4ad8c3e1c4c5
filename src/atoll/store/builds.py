"""Builds of templates, their logs, tags, and the cache of steps.

A build's row is changed by whoever has read its newest revision, and while it is being built by its owner alone: `commit` says whether
that is still so. `beat` is the owner's sign of life; it changes no revision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Final

import sqlalchemy as sa
from pydantic import TypeAdapter

from atoll.base.ids import ClientId, Prefix, TeamId, TemplateId
from atoll.domain.building import UNENDED, Build, Line, Recipe, Result, State, Tag, client_of
from atoll.domain.template import Template
from atoll.store import rows
from atoll.store.sandboxes import LIVING_STATES
from atoll.store.tables import SANDBOXES, TEMPLATES
from atoll.store.tables import TEMPLATE_BUILD_LINES as LINES
from atoll.store.tables import TEMPLATE_BUILDS as BUILDS
from atoll.store.tables import TEMPLATE_STEPS as STEPS
from atoll.store.tables import TEMPLATE_TAGS as TAGS

_RECIPE: Final = TypeAdapter(Recipe)
_RESULT: Final = TypeAdapter(Result)
_UNENDED: Final = tuple(state.value for state in UNENDED)


def add(conn: sa.Connection, build: Build) -> None:
    """A new build."""
    conn.execute(sa.insert(BUILDS), {"id": build.id, "revision": build.revision, **_values(build)})


def get(conn: sa.Connection, build_id: str) -> Build | None:
    """One build, whoever's."""
    row = conn.execute(sa.select(BUILDS).where(BUILDS.c.id == build_id)).mappings().first()
    return _build(row) if row else None


def of_template(conn: sa.Connection, template_id: str, *, limit: int = 100) -> Sequence[Build]:
    """Its newest builds, newest first."""
    query = sa.select(BUILDS).where(BUILDS.c.template_id == template_id)
    return [_build(row) for row in conn.execute(query.order_by(BUILDS.c.created_at.desc(), BUILDS.c.id).limit(limit)).mappings()]


def summary(conn: sa.Connection, team_id: str) -> dict[str, tuple[int, State]]:
    """Of each of a team's templates that was ever built: how many builds are on record, and the state of the newest."""
    query = sa.select(BUILDS.c.template_id, BUILDS.c.state).where(BUILDS.c.team_id == team_id).order_by(BUILDS.c.created_at, BUILDS.c.id)
    found: dict[str, tuple[int, State]] = {}
    for template_id, state in conn.execute(query):
        count, _ = found.get(template_id, (0, None))
        found[template_id] = (count + 1, State(state))
    return found


def unended(conn: sa.Connection, *, team_id: str | None = None, template_id: str | None = None) -> Sequence[Build]:
    """Builds that have not ended, oldest first."""
    query = sa.select(BUILDS).where(BUILDS.c.state.in_(_UNENDED))
    if team_id is not None:
        query = query.where(BUILDS.c.team_id == team_id)
    if template_id is not None:
        query = query.where(BUILDS.c.template_id == template_id)
    return [_build(row) for row in conn.execute(query.order_by(BUILDS.c.created_at, BUILDS.c.id)).mappings()]


def commit(conn: sa.Connection, build: Build) -> Build | None:
    """Record a build as it is now. None, and nothing changes, when its row has moved on since it was read."""
    done = conn.execute(
        sa.update(BUILDS)
        .where(BUILDS.c.id == build.id, BUILDS.c.revision == build.revision)
        .values(revision=build.revision + 1, **_values(build))
    )
    return replace(build, revision=build.revision + 1) if done.rowcount == 1 else None


def beat(conn: sa.Connection, build_id: str, *, owner: str, now: float) -> bool:
    """The owner's sign of life; False when it is its build no more."""
    mine = (BUILDS.c.id == build_id, BUILDS.c.owner == owner, BUILDS.c.state == State.BUILDING.value)
    return conn.execute(sa.update(BUILDS).where(*mine).values(beat_at=now)).rowcount == 1


def seal(conn: sa.Connection, build_id: str, sealed: bytes | None) -> None:
    """Keep, or throw away, its registry's credentials."""
    conn.execute(sa.update(BUILDS).where(BUILDS.c.id == build_id).values(sealed=sealed))


def sealed(conn: sa.Connection, build_id: str) -> bytes | None:
    """Its registry's credentials, sealed."""
    found: bytes | None = conn.execute(sa.select(BUILDS.c.sealed).where(BUILDS.c.id == build_id)).scalar_one_or_none()
    return found


def say(conn: sa.Connection, build_id: str, lines: Sequence[Line]) -> None:
    """Lines after those that are there; none of a build that is gone. *Errors*: IntegrityError when two do it at once: only the owner does."""
    if conn.execute(sa.select(BUILDS.c.id).where(BUILDS.c.id == build_id)).first() is None:
        return
    last = conn.execute(sa.select(sa.func.max(LINES.c.seq)).where(LINES.c.build_id == build_id)).scalar_one()
    first = 0 if last is None else int(last) + 1
    conn.execute(
        sa.insert(LINES),
        [
            {"build_id": build_id, "seq": first + n, "at": one.at, "level": one.level, "step": one.step, "message": one.message}
            for n, one in enumerate(lines)
        ],
    )


def lines(
    conn: sa.Connection, build_id: str, *, levels: Sequence[str] | None = None, offset: int = 0, limit: int | None = None
) -> Sequence[Line]:
    """Its log, oldest first; of these levels, without the first `offset` lines, `limit` at most."""
    query = sa.select(LINES).where(LINES.c.build_id == build_id).order_by(LINES.c.seq)
    # A line's number is its place: without a choice of levels nothing is counted through, however long a log is.
    query = query.where(LINES.c.seq >= offset) if levels is None else query.where(LINES.c.level.in_(levels)).offset(offset)
    found = conn.execute(query if limit is None else query.limit(limit)).mappings()
    return [Line(row["at"], row["level"], row["message"], row["step"]) for row in found]


def last_lines(conn: sa.Connection, build_id: str, step: str | None, *, levels: Sequence[str], limit: int) -> Sequence[Line]:
    """The end of what one step has said at these levels, oldest first."""
    its = (LINES.c.build_id == build_id, LINES.c.step == step, LINES.c.level.in_(levels))
    found = conn.execute(sa.select(LINES).where(*its).order_by(LINES.c.seq.desc()).limit(limit)).mappings()
    return [Line(row["at"], row["level"], row["message"], row["step"]) for row in found][::-1]


def templates_of(conn: sa.Connection, team_id: str, name: str) -> Sequence[Template]:
    """The team's own templates of that name (one at most), and everybody's."""
    query = sa.select(TEMPLATES).where(sa.or_(TEMPLATES.c.team_id == team_id, TEMPLATES.c.team_id.is_(None)))
    found = [rows.template(row) for row in conn.execute(query).mappings()]
    return [one for one in found if name in (one.name, *one.aliases)]


def tag(conn: sa.Connection, template_id: str, name: str, build_id: str, *, now: float) -> None:
    """A tag names this build from now on. *Idempotency*: of one that does already nothing changes."""
    its = (TAGS.c.template_id == template_id, TAGS.c.name == name)
    known = conn.execute(sa.select(TAGS.c.build_id).where(*its)).scalar_one_or_none()
    if known == build_id:
        return
    conn.execute(sa.delete(TAGS).where(*its))
    conn.execute(sa.insert(TAGS), {"template_id": template_id, "name": name, "build_id": build_id, "assigned_at": now})


def untag(conn: sa.Connection, template_id: str, names: Sequence[str]) -> int:
    """Take tags away; how many there were."""
    return conn.execute(sa.delete(TAGS).where(TAGS.c.template_id == template_id, TAGS.c.name.in_(names))).rowcount


def tags(conn: sa.Connection, template_id: str) -> Sequence[Tag]:
    """A template's tags, by name."""
    found = conn.execute(sa.select(TAGS).where(TAGS.c.template_id == template_id).order_by(TAGS.c.name)).mappings()
    return [Tag(row["name"], row["build_id"], row["assigned_at"]) for row in found]


def tagged(conn: sa.Connection, template_id: str, name: str) -> Build | None:
    """The build that a tag names."""
    query = sa.select(BUILDS).join(TAGS, TAGS.c.build_id == BUILDS.c.id)
    row = conn.execute(query.where(TAGS.c.template_id == template_id, TAGS.c.name == name)).mappings().first()
    return _build(row) if row else None


def step(conn: sa.Connection, team_id: str, key: str) -> str | None:
    """The image that a step of this key has made for the team."""
    found: str | None = conn.execute(sa.select(STEPS.c.image).where(STEPS.c.team_id == team_id, STEPS.c.key == key)).scalar_one_or_none()
    return found


def keep_step(conn: sa.Connection, team_id: str, key: str, image: str, *, now: float) -> None:
    """Remember, or use again, what a step has made."""
    its = (STEPS.c.team_id == team_id, STEPS.c.key == key)
    if conn.execute(sa.update(STEPS).where(*its).values(image=image, used_at=now)).rowcount == 0:
        conn.execute(sa.insert(STEPS), {"team_id": team_id, "key": key, "image": image, "used_at": now})


def forget_steps(conn: sa.Connection, *, before: float) -> int:
    """Forget steps that no build has used since; how many."""
    return conn.execute(sa.delete(STEPS).where(STEPS.c.used_at < before)).rowcount


def forget(conn: sa.Connection, *, before: float) -> int:
    """Remove builds that ended before a moment and that no tag names; how many."""
    named = sa.select(TAGS.c.build_id).union(sa.select(TEMPLATES.c.build_id))
    old = sa.select(BUILDS.c.id).where(BUILDS.c.finished_at < before, BUILDS.c.id.not_in(named))
    ids = list(conn.execute(old).scalars())
    _remove(conn, ids)
    return len(ids)


def remove_of_template(conn: sa.Connection, template_id: str) -> None:
    """All builds and tags of a template go. *Idempotency*: of one that has none nothing changes."""
    _remove(conn, list(conn.execute(sa.select(BUILDS.c.id).where(BUILDS.c.template_id == template_id)).scalars()))
    conn.execute(sa.delete(TAGS).where(TAGS.c.template_id == template_id))


def orphans(conn: sa.Connection) -> Sequence[str]:
    """Ids of living sandboxes that serve a build which is not being built, in one look."""
    query = sa.select(SANDBOXES.c.id, SANDBOXES.c.client_id).where(
        SANDBOXES.c.client_id.startswith(Prefix.BUILD, autoescape=True), SANDBOXES.c.state.in_(LIVING_STATES)
    )
    found = [tuple(row) for row in conn.execute(query)]
    going = sa.select(BUILDS.c.id).where(BUILDS.c.state == State.BUILDING.value)
    served = {str(client_of(build_id)) for build_id in conn.execute(going).scalars()} if found else set()
    return [sandbox_id for sandbox_id, client_id in found if client_id not in served]


def serving(conn: sa.Connection) -> set[ClientId]:
    """The clients of builds that are under way, or that a tag or a template names."""
    going = sa.select(BUILDS.c.id).where(BUILDS.c.state == State.BUILDING.value)
    named = going.union(sa.select(TAGS.c.build_id), sa.select(TEMPLATES.c.build_id))
    return {client_of(build_id) for build_id in conn.execute(named).scalars() if build_id}


def images_wanted(conn: sa.Connection) -> set[str]:
    """Digests of the images that builds or cached steps stand for."""
    made = sa.select(BUILDS.c.image).where(BUILDS.c.image.is_not(None))
    return {*conn.execute(made).scalars(), *conn.execute(sa.select(STEPS.c.image)).scalars()}


def _remove(conn: sa.Connection, ids: Sequence[str]) -> None:
    if ids:
        conn.execute(sa.delete(LINES).where(LINES.c.build_id.in_(ids)))
        conn.execute(sa.delete(BUILDS).where(BUILDS.c.id.in_(ids)))


def _values(one: Build) -> rows.Values:
    return {
        "template_id": one.template_id,
        "team_id": one.team_id,
        "name": one.name,
        "tags": list(one.tags),
        "state": one.state.value,
        "cpu_millis": one.cpu_millis,
        "memory_mib": one.memory_mib,
        "disk_mib": one.disk_mib,
        "recipe": None if one.recipe is None else _RECIPE.dump_python(one.recipe, mode="json"),
        "owner": one.owner,
        "beat_at": one.beat_at,
        "attempts": one.attempts,
        "created_at": one.created_at,
        "started_at": one.started_at,
        "finished_at": one.finished_at,
        "code": one.code,
        "message": one.message,
        "failed_step": one.failed_step,
        "result": None if one.result is None else asdict(one.result),
        "image": None if one.result is None else one.result.image,
    }


def _build(row: sa.RowMapping) -> Build:
    return Build(
        id=row["id"],
        revision=row["revision"],
        template_id=TemplateId(row["template_id"]),
        team_id=TeamId(row["team_id"]),
        name=row["name"],
        tags=tuple(row["tags"]),
        state=State(row["state"]),
        cpu_millis=row["cpu_millis"],
        memory_mib=row["memory_mib"],
        disk_mib=row["disk_mib"],
        created_at=row["created_at"],
        recipe=None if row["recipe"] is None else _RECIPE.validate_python(row["recipe"]),
        owner=row["owner"],
        beat_at=row["beat_at"],
        attempts=row["attempts"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        code=row["code"],
        message=row["message"],
        failed_step=row["failed_step"],
        result=None if row["result"] is None else _RESULT.validate_python(row["result"]),
    )
