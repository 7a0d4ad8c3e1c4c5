"""What a Dockerfile asks for, as values: stages, their steps, and what they take from each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from atoll.cli.dockerfile.words import Scope


@dataclass(frozen=True, slots=True)
class Copied:
    """A COPY or ADD step: files of the directory, which are still to be sent, or of another stage."""

    source: str
    """Relative: to the directory, or to the root of the other stage; a URL, or the name of what is written here."""
    target: str
    owner: str
    """Empty: root's; from other stages and archives: as they are there."""
    mode: str
    line: int = field(default=0, compare=False)
    word: str = "COPY"
    origin: str | None = None
    """The stage that it comes from, by name or number, or an image."""
    excluded: tuple[str, ...] = ()
    content: str | None = None
    """Of a here-document."""
    checksum: str = ""
    git: bool = False
    """The source is a git repository: `URL[#REF[:DIRECTORY]]`."""
    keep_git: bool = False
    """With its `.git`."""


@dataclass(frozen=True, slots=True)
class Mounted:
    """What is at a place during one RUN, and is no part of its result: an empty directory, or files as in `Copied`."""

    target: str
    source: str | None = None
    """None: it begins empty."""
    origin: str | None = None
    owner: str = ""
    mode: str = ""
    line: int = field(default=0, compare=False)
    kind: str = "files"
    """`files`, or `cache`, `secret` or `ssh`, which have an id."""
    id: str = ""
    env: str = ""
    """The variable that a secret is in."""
    required: bool = False


@dataclass(frozen=True, slots=True)
class Ran:
    """A RUN with mounts."""

    command: str
    mounts: tuple[Mounted, ...]


Step = tuple[str, list[str]] | Copied | Ran
"""E2B's word and its arguments, or what has more to it."""


@dataclass(slots=True)
class Stage:
    """From a FROM to the next one; or an image of which files are copied, which has no steps."""

    name: str
    """As it is called in logs."""
    line: int
    base: str = ""
    """The image, or `template:NAME`; empty when `parent` is set."""
    parent: Stage | None = None
    steps: list[Step] = field(default_factory=list)
    scope: Scope = field(default_factory=Scope)
    shell: tuple[str, ...] = ()
    """What SHELL has named; none: whatever a sandbox's commands are run by."""
    begins: dict[str, str] = field(default_factory=dict)
    """ENTRYPOINT and CMD, as a shell takes them."""
    alone: bool = False
    """ENTRYPOINT is in shell form, which takes no CMD."""
    notes: list[str] = field(default_factory=list)
    user: bool = False
    """Whether USER was said, here or in a parent."""
    workdir: bool = False

    def origins(self) -> Iterator[tuple[str, int]]:
        """The stages that it copies from, as they are named, with the lines."""
        for step in self.steps:
            parts = step.mounts if isinstance(step, Ran) else (step,) if isinstance(step, Copied) else ()
            yield from ((part.origin, part.line) for part in parts if part.origin is not None)


@dataclass(slots=True)
class Built:
    """What is to be built: `stages` in an order in which each comes after those that it needs, the wanted one last."""

    stages: list[Stage]
    origins: dict[str, int]
    """Where in `stages` each name of an origin, in small letters, is."""
    start_command: str | None
    notes: list[str]
    """Instructions without effect, with their lines."""

    @property
    def target(self) -> Stage:
        """The one that becomes the template."""
        return self.stages[-1]

    @property
    def from_image(self) -> str:
        """What the wanted stage begins with."""
        return self.target.base

    @property
    def steps(self) -> list[Step]:
        """Those of the wanted stage."""
        return self.target.steps
