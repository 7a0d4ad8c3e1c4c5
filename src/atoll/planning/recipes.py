"""Recipes: what each step of a build does, and by what it is known again.

Theory of operation. A build carries a context (user, directory, environment) from step to step. ENV and USER only change the context; RUN,
COPY and WORKDIR also ask for an action in a sandbox, whose change of files becomes a layer. A step's key follows from the key before it and
from what was asked for, so the first changed step changes the keys of all that follow. Pure: no step is run here.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.domain.building import SCRATCH, Mount, MountKind, Recipe, Stage, Step, StepKind

FORMAT: Final = 2
"""Raised when the same steps begin to make something else: nothing that was cached before is used again."""
USER: Final = "user"
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STEPS_MAX: Final = 512
STAGES_MAX: Final = 64
MOUNTS_MAX: Final = 16
MOUNT_ID: Final = re.compile(r"[^\x00-\x1f]{1,256}")
STAGE_NAME: Final = re.compile(r"[^\s:\x00][^\s\x00]{0,255}")
KEPT: Final = ("/proc/", "/sys/", "/dev/", "/.atoll/")
"""Where nothing of a step's own may be mounted."""
ARGUMENT_BYTES_MAX: Final = 128 << 10
ENV_BYTES_MAX: Final = 32 << 10
FILES_HASH: Final = re.compile(r"[0-9a-f]{64}")

_VARIABLE: Final = re.compile(
    r"\\\$|\$(?:(?P<plain>[A-Za-z_][A-Za-z0-9_]*)|\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)(?:(?P<how>:?[-+])(?P<word>(?:[^{}]|\$\{[^{}]*\})*))?\})"
)
_NAME: Final = re.compile(r"[^=\x00]+")
_VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_MODE: Final = re.compile(r"[0-7]{1,4}")
_ACCOUNT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?")


@dataclass(frozen=True, slots=True)
class Context:
    """What a step begins with, and leaves to the next."""

    user: str = USER
    workdir: str | None = None
    """None: the user's home."""
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def directory(self) -> str:
        """Where commands begin, as far as it is known without looking inside."""
        return self.workdir or home_of(self.user)


@dataclass(frozen=True, slots=True)
class Run:
    """A command of a shell."""

    command: str
    user: str
    mounts: tuple[Mount, ...] = ()
    """Their targets are absolute here."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Files of an uploaded archive, or of another stage. `source`: relative to the client's own directory, or to the stage's root."""

    source: str
    target: str
    """Absolute; ends with a slash when a directory is meant."""
    owner: str
    """Empty: whoever's they are."""
    mode: str | None
    files_hash: str | None
    from_stage: int | None = None
    unpacked: bool = False
    """The archive is the client's own, and comes out as it is."""


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    """A directory to work in, of the user's where it has to be made."""

    path: str
    owner: str


Action = Run | Copy | MakeDirectory


def home_of(user: str) -> str:
    """Where a user is at home, by custom."""
    name = user.partition(":")[0]
    return "/root" if name in ("root", "0") else f"/home/{name}"


def check(recipe: Recipe) -> None:
    """*Errors*: Refused INVALID_REQUEST, naming the step (from 1), when it cannot be followed."""
    if len(recipe.steps) + sum(len(one.steps) for one in recipe.stages) > STEPS_MAX or len(recipe.stages) > STAGES_MAX:
        raise Refused(Code.INVALID_REQUEST, f"a build has at most {STEPS_MAX} steps and {STAGES_MAX} stages")
    contexts: list[Context] = []
    for number, stage in enumerate(recipe.stages):
        if not STAGE_NAME.fullmatch(stage.name):
            raise Refused(Code.INVALID_REQUEST, f"stage {number}: {stage.name[:80]!r} is no name of a stage")
        contexts.append(_check_stage(stage, contexts, f"stage {stage.name}: "))
    _check_stage(recipe, contexts, "")
    for text in (recipe.start_command, recipe.ready_command):
        _check_text(text or "")


def _check_stage(stage: Recipe | Stage, earlier: Sequence[Context], where: str) -> Context:
    """The context that it ends with, as far as it is known without looking inside."""
    begins = [one for one in (stage.from_image, stage.from_template, stage.from_stage) if one is not None]
    if not begins:
        message = "a build begins with an image or a template: fromImage or fromTemplate is missing"
        raise Refused(Code.INVALID_REQUEST, where + message)
    if len(begins) > 1:
        raise Refused(Code.INVALID_REQUEST, f"{where}a build begins with an image or with a template, not with both")
    _check_origins(stage.from_stage, earlier, where)
    context = Context() if stage.from_stage is None else earlier[stage.from_stage]
    for number, step in enumerate(stage.steps, 1):
        try:
            for origin in origins(step):
                _check_origins(origin, earlier, "")
            context, _ = follow(context, step)
        except Refused as error:
            raise Refused(Code.INVALID_REQUEST, f"{where}step {number} ({step.kind}): {error.message}") from error
    return context


def _check_origins(origin: int | None, earlier: Sequence[Context], where: str) -> None:
    if origin is not None and not 0 <= origin < len(earlier):
        raise Refused(Code.INVALID_REQUEST, f"{where}there is no stage {origin} before this one")


def origins(step: Step) -> list[int]:
    """The stages whose files a step needs, in the order in which it names them."""
    return [origin for origin in (step.from_stage, *(mount.from_stage for mount in step.mounts)) if origin is not None]


def follow(context: Context, step: Step) -> tuple[Context, Action | None]:
    """The context after a step, and what is to be done for it. *Errors*: Refused INVALID_REQUEST."""
    for text in step.args:
        _check_text(text)
    match step.kind:
        case StepKind.RUN:
            return context, _run(context, step)
        case StepKind.COPY | StepKind.ADD:
            return context, _copy(context, step)
        case StepKind.ENV:
            return _env(context, step.args), None
        case StepKind.WORKDIR:
            path = _absolute(_first(step.args, "a directory"), context)
            return replace(context, workdir=path), MakeDirectory(path, context.user)
        case StepKind.USER:
            # Whether there is such an account shows when a command is run as it.
            return replace(context, user=_first(step.args, "a user")), None


def registry_of(image: str) -> str:
    """The host (and port) that an image's reference names; empty: the default one."""
    first, slash, _ = image.partition("/")
    return first if slash and (set(first) & {".", ":"} or first == "localhost") else ""


def credentials_for(recipe: Recipe) -> str | None:
    """The registry that a recipe's credentials are for: its own image's, else that of the first stage that begins with one; None: none."""
    images = [image for image in (recipe.from_image, *(one.from_image for one in recipe.stages)) if image not in (None, SCRATCH)]
    return registry_of(images[0]) if images and images[0] is not None else None


def base_key(image: str, context: Context) -> str:
    """The key that the first step's follows from."""
    return _digest([FORMAT, image, context.user, context.workdir, sorted(context.env.items())])


def step_key(previous: str, step: Step, images: Sequence[str] = ()) -> str:
    """By what a step after these is known again: what it is given, never when or by which build. `images`: of its `origins`."""
    mounts = [
        [one.target, one.source, one.files_hash, one.owner, one.mode, one.from_stage is not None]
        + ([one.kind.value, one.id, one.env, one.required] if one.kind is not MountKind.FILES else [])
        for one in step.mounts
    ]
    more = [list(images), mounts] if images or mounts else []
    return _digest([previous, step.kind.value, list(step.args), step.files_hash, *more])


def expand(text: str, env: Mapping[str, str]) -> str:
    """Variables replaced by their values: `$NAME`, `${NAME}`, `${NAME:-word}` and `${NAME:+word}` (without a colon: empty is set, too).

    One that is not set is empty, and a backslash keeps a dollar.
    """

    def value(match: re.Match[str]) -> str:
        name = match["plain"] or match["braced"]
        if name is None:
            return "$"
        found, how = env.get(name), match["how"] or ""
        there = bool(found) if how.startswith(":") else found is not None
        if how.endswith("+"):
            return expand(match["word"], env) if there else ""
        return expand(match["word"], env) if how and not there else found or ""

    return _VARIABLE.sub(value, text)


def describe(step: Step) -> str:
    """A step in one line, for logs."""
    args = step.args[::2] if step.kind is StepKind.ENV else tuple(arg for arg in step.args if arg)
    text = f"{step.kind} {' '.join(args)}"
    return text if len(text) <= 500 else text[:497] + "..."


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()).hexdigest()


def _check_text(text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise Refused(Code.INVALID_REQUEST, "an argument is not Unicode") from None
    if "\0" in text or size > ARGUMENT_BYTES_MAX:
        raise Refused(Code.INVALID_REQUEST, f"an argument holds a NUL character or more than {ARGUMENT_BYTES_MAX} bytes")


def _first(args: tuple[str, ...], what: str) -> str:
    if not args or not args[0]:
        raise Refused(Code.INVALID_REQUEST, f"{what} is missing")
    return args[0]


def _run(context: Context, step: Step) -> Run:
    if step.from_stage is not None:
        raise Refused(Code.INVALID_REQUEST, "only files are copied from another stage")
    if len(step.mounts) > MOUNTS_MAX:
        raise Refused(Code.INVALID_REQUEST, f"a step has at most {MOUNTS_MAX} mounts")
    command, args = _first(step.args, "a command"), step.args
    return Run(command, args[1] if len(args) > 1 and args[1] else context.user, tuple(_mount(context, one) for one in step.mounts))


def _mount(context: Context, one: Mount) -> Mount:
    for text in (one.target, one.source or ""):
        _check_text(text)
    if one.kind is not MountKind.FILES and (not MOUNT_ID.fullmatch(one.id) or one.source is not None or one.from_stage is not None):
        raise Refused(Code.INVALID_REQUEST, f"a mount of kind {one.kind} has an id and no source, not {one.id[:80]!r}")
    if one.env and (one.kind is not MountKind.SECRET or not _VARIABLE_NAME.fullmatch(one.env)):
        raise Refused(Code.INVALID_REQUEST, f"{one.env[:80]!r} is no variable that a secret can be in")
    if not one.target and (one.kind is MountKind.SSH or one.env):
        return one
    if one.kind is MountKind.SECRET and one.owner and not all(part.isdigit() for part in one.owner.split(":")):
        raise Refused(Code.INVALID_REQUEST, f"{one.owner[:80]!r}: the owner of a secret is told by numbers")
    target = _absolute(_first((one.target,), "where something is mounted"), context)
    if target == "/" or f"{target}/".startswith(KEPT):
        raise Refused(Code.INVALID_REQUEST, f"nothing is mounted at {target[:200]!r}")
    _check_owner(one.owner, one.mode)
    if one.source is None:
        return replace(one, target=target)
    if one.from_stage is None:
        _check_hash(one.files_hash)
    return replace(one, target=target, source=_source(one.source, one.from_stage))


def _source(source: str, from_stage: int | None) -> str:
    """Relative, below what it is taken from."""
    if from_stage is not None:
        return posixpath.normpath(f"/{source}").lstrip("/") or "."
    path = posixpath.normpath(source)
    if path.startswith(("/", "../")) or path == "..":
        raise Refused(Code.INVALID_REQUEST, f"{path[:200]!r} is not below the directory that files are copied from")
    return path


def _check_hash(files_hash: str | None) -> None:
    if files_hash is None or not FILES_HASH.fullmatch(files_hash):
        raise Refused(Code.INVALID_REQUEST, "filesHash is the SHA-256 of the files, 64 hexadecimal digits")


def _check_owner(owner: str, mode: str) -> None:
    if owner and not _ACCOUNT.fullmatch(owner):
        raise Refused(Code.INVALID_REQUEST, f"{owner[:80]!r} is no name of a user")
    if mode and not _MODE.fullmatch(mode):
        raise Refused(Code.INVALID_REQUEST, f"{mode[:80]!r} is no octal mode")


def _copy(context: Context, step: Step) -> Copy:
    source, target, owner, mode = [*step.args[:4], *[""] * (4 - len(step.args))]
    unpacked = step.kind is StepKind.ADD
    if not source or not target:
        raise Refused(Code.INVALID_REQUEST, "what is copied, and where to, is missing")
    if step.mounts or (unpacked and step.from_stage is not None):
        raise Refused(Code.INVALID_REQUEST, f"{step.kind} knows no mounts, and ADD no other stage")
    if step.from_stage is None:
        _check_hash(step.files_hash)
    source = _source(source, step.from_stage)
    _check_owner(owner, mode)
    into = "/" if target.endswith("/") or posixpath.basename(target) in (".", "..") else ""
    path = _absolute(target, context)
    if not owner and not unpacked and step.from_stage is None:
        owner = context.user
    return Copy(
        "." if unpacked else source, path if path == "/" else path + into, owner, mode or None, step.files_hash, step.from_stage, unpacked
    )


def _env(context: Context, args: tuple[str, ...]) -> Context:
    if not args or len(args) % 2:
        raise Refused(Code.INVALID_REQUEST, "variables come in pairs of name and value")
    env = dict(context.env)
    seen = {"PATH": PATH, "HOME": home_of(context.user), **env}
    for name, value in zip(args[::2], args[1::2], strict=True):
        if not _NAME.fullmatch(name):
            raise Refused(Code.INVALID_REQUEST, f"{name[:80]!r} is no name of a variable")
        env[name] = seen[name] = expand(value, seen)
    if sum(len(name.encode()) + len(value.encode()) for name, value in env.items()) > ENV_BYTES_MAX:
        raise Refused(Code.INVALID_REQUEST, f"the environment has more than {ENV_BYTES_MAX} bytes")
    return replace(context, env=env)


def _absolute(path: str, context: Context) -> str:
    expanded = expand(path, {"HOME": home_of(context.user), **context.env})
    if expanded == "~" or expanded.startswith("~/"):
        expanded = home_of(context.user) + expanded[1:]
    joined = posixpath.normpath(posixpath.join(context.directory, expanded))
    return "/" + joined.lstrip("/")
