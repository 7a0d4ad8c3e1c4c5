"""Template: what users name; a build is one version of it, an image what hosts hold."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.base.ids import TeamId, TemplateId


@dataclass(frozen=True, slots=True)
class Template:
    """A template and its current build. *Units*: millicores, MiB, wall seconds."""

    id: TemplateId
    team_id: TeamId | None
    """None: everybody's."""
    name: str
    aliases: tuple[str, ...]
    public: bool
    build_id: str
    """A UUID."""
    image: str
    """Digest of the image; empty until a first build is ready."""
    cpu_millis: int
    memory_mib: int
    disk_mib: int
    default_user: str
    default_workdir: str | None
    created_at: float
    updated_at: float
    spawn_count: int = 0
    last_spawned_at: float | None = None
    env: tuple[tuple[str, str], ...] = ()
    """Environment of what runs inside, below what a request sets."""
    command: tuple[str, ...] = ()
    """The start command: runs in each new sandbox."""
    command_user: str = ""
    """Whom the start command runs as; empty: root."""
    ready_command: tuple[str, ...] = ()
    """Says, by its status, whether the start command has got so far that a sandbox is of use."""
    source: str = ""
    """Where its image came from; empty for ready-made ones."""
