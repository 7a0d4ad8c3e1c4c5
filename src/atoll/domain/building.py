"""Build: steps that become a new version of a template, as an operation that goes on without its client.

Theory of operation. Control writes every field. A build is WAITING from when it is asked for until its steps come; then it is BUILDING,
and one control process owns it: it renews `beat_at`, and every commit of its is tied to the revision that it has read. A build whose
owner is not heard of is taken over by another process, which begins at the first step: what was done is found in the cache of steps, so
nothing is done twice. It ends once, READY together with the template's new version, or FAILED with a stable code; a newer build of the
same template and tag, or its deletion, ends it too. Registry credentials are in a sealed column, and are removed when it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from atoll.base.ids import ClientId, Prefix, TeamId, TemplateId
from atoll.domain.template import Template

DEFAULT_TAG: Final = "default"
SCRATCH: Final = "scratch"
"""As an image: nothing."""


class State(StrEnum):
    """Where a build is."""

    WAITING = "waiting"
    BUILDING = "building"
    READY = "ready"
    FAILED = "failed"


class Event(StrEnum):
    """What moves it."""

    BEGUN = "begun"
    DONE = "done"
    BROKE = "broke"
    CANCELLED = "cancelled"


MOVES: Final[Mapping[tuple[State, Event], State]] = {
    (State.WAITING, Event.BEGUN): State.BUILDING,
    (State.WAITING, Event.CANCELLED): State.FAILED,
    (State.BUILDING, Event.DONE): State.READY,
    (State.BUILDING, Event.BROKE): State.FAILED,
    (State.BUILDING, Event.CANCELLED): State.FAILED,
}

UNENDED: Final = (State.WAITING, State.BUILDING)


class StepKind(StrEnum):
    """What a step does, in E2B's words."""

    RUN = "RUN"
    COPY = "COPY"
    ADD = "ADD"
    """An archive, unpacked; Atoll's own."""
    ENV = "ENV"
    WORKDIR = "WORKDIR"
    USER = "USER"


class MountKind(StrEnum):
    """What is mounted."""

    FILES = "files"
    """Files from elsewhere, or an empty directory."""
    CACHE = "cache"
    """What earlier RUNs of the team's builds have left under this id."""
    SECRET = "secret"  # noqa: S105 - a word, not a secret
    SSH = "ssh"
    """An agent that has a key, at a socket."""


@dataclass(frozen=True, slots=True)
class Mount:
    """What is at a place while one RUN runs, and is no part of its layer."""

    target: str
    """Empty where there is none: an agent's socket, a secret that is a variable."""
    source: str | None = None
    """Of files, relative; None: an empty directory."""
    files_hash: str | None = None
    from_stage: int | None = None
    owner: str = ""
    mode: str = ""
    kind: MountKind = MountKind.FILES
    id: str = ""
    """Of a cache, a secret or a key."""
    env: str = ""
    """The variable that a secret is in."""
    required: bool = False
    """Of a secret: without it the step fails."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step as it was asked for."""

    kind: StepKind
    args: tuple[str, ...]
    files_hash: str | None = None
    """Of what a COPY copies; names the archive that the client has sent."""
    force: bool = False
    """Run it, and all after it, whatever the cache has."""
    from_stage: int | None = None
    """Of a COPY: the stage whose files these are, instead of the client's."""
    mounts: tuple[Mount, ...] = ()
    """Of a RUN."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps whose files others copy, or which others begin with. Begins with an image, a template or an earlier stage."""

    name: str
    from_image: str | None = None
    from_template: str | None = None
    from_stage: int | None = None
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is built. Holds no secret, only the names of those that its steps want."""

    from_image: str | None = None
    from_template: str | None = None
    steps: tuple[Step, ...] = ()
    force: bool = False
    start_command: str | None = None
    ready_command: str | None = None
    from_stage: int | None = None
    stages: tuple[Stage, ...] = ()
    """What it begins with or copies from; each needs earlier ones only."""


@dataclass(frozen=True, slots=True)
class Build:
    """One build. *Units*: millicores, MiB, wall seconds."""

    id: str
    """A UUID."""
    revision: int
    template_id: TemplateId
    team_id: TeamId
    name: str
    """Of the template."""
    tags: tuple[str, ...]
    state: State
    cpu_millis: int
    memory_mib: int
    disk_mib: int
    created_at: float
    recipe: Recipe | None = None
    """None until its steps have come."""
    owner: str | None = None
    """The control process that builds it."""
    beat_at: float | None = None
    attempts: int = 0
    """How many processes have begun it."""
    started_at: float | None = None
    finished_at: float | None = None
    code: str | None = None
    message: str | None = None
    failed_step: str | None = None
    """`base`, the number of a step from 1, or `finalize`; of another stage: `NAME:base`, `NAME:1`."""
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What a build has made: everything of a template that comes from its steps."""

    image: str
    env: tuple[tuple[str, str], ...] = ()
    default_user: str = "user"
    default_workdir: str | None = None
    command: tuple[str, ...] = ()
    command_user: str = ""
    ready_command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a build's log. *Units*: wall seconds."""

    at: float
    level: str
    """`debug`, `info`, `warn` or `error`."""
    message: str
    step: str | None = None


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What a client asks for first. None: as templates have it. *Units*: millicores, MiB."""

    name: str
    """`name` or `name:tag`, perhaps with the team's own name before it."""
    tags: tuple[str, ...] = ()
    cpu_millis: int | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    pushed: Recipe | None = None
    """What is made of an image that the client pushes to the registry before it starts the build; all but the image's name."""


@dataclass(frozen=True, slots=True)
class Tag:
    """A name of one version of a template. *Units*: wall seconds."""

    name: str
    build_id: str
    assigned_at: float


def client_of(build_id: str) -> ClientId:
    """Who a build's sandboxes belong to, beside the team: by this they are found again, and hidden from lists."""
    return ClientId(f"{Prefix.BUILD}{build_id}")


def version(template: Template, build: Build, result: Result, *, now: float) -> Template:
    """The template as this build makes it."""
    return replace(
        template,
        build_id=build.id,
        image=result.image,
        cpu_millis=build.cpu_millis,
        memory_mib=build.memory_mib,
        disk_mib=build.disk_mib,
        default_user=result.default_user,
        default_workdir=result.default_workdir,
        env=result.env,
        command=result.command,
        command_user=result.command_user,
        ready_command=result.ready_command,
        source=f"build:{build.id}",
        updated_at=now,
    )
