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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.domain.building import Recipe, Step, StepKind

FORMAT: Final = 1
"""Raised when the same steps begin to make something else: nothing that was cached before is used again."""
USER: Final = "user"
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STEPS_MAX: Final = 512
ARGUMENT_BYTES_MAX: Final = 128 << 10
ENV_BYTES_MAX: Final = 32 << 10
FILES_HASH: Final = re.compile(r"[0-9a-f]{64}")

_VARIABLE: Final = re.compile(r"\\\$|\$(?:(?P<plain>[A-Za-z_][A-Za-z0-9_]*)|\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)\})")
_NAME: Final = re.compile(r"[^=\x00]+")
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


@dataclass(frozen=True, slots=True)
class Copy:
    """Files of an uploaded archive. `source` is as the client named it, relative to its own directory."""

    source: str
    target: str
    """Absolute; ends with a slash when a directory is meant."""
    owner: str
    mode: str | None
    files_hash: str


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
    if recipe.from_image is not None and recipe.from_template is not None:
        raise Refused(Code.INVALID_REQUEST, "a build begins with an image or with a template, not with both")
    if recipe.from_image is None and recipe.from_template is None:
        raise Refused(Code.INVALID_REQUEST, "a build begins with an image or a template: fromImage or fromTemplate is missing")
    if len(recipe.steps) > STEPS_MAX:
        raise Refused(Code.INVALID_REQUEST, f"a build has at most {STEPS_MAX} steps")
    context = Context()
    for number, step in enumerate(recipe.steps, 1):
        try:
            context, _ = follow(context, step)
        except Refused as error:
            raise Refused(Code.INVALID_REQUEST, f"step {number} ({step.kind}): {error.message}") from error
    for text in (recipe.start_command, recipe.ready_command):
        _check_text(text or "")


def follow(context: Context, step: Step) -> tuple[Context, Action | None]:
    """The context after a step, and what is to be done for it. *Errors*: Refused INVALID_REQUEST."""
    for text in step.args:
        _check_text(text)
    match step.kind:
        case StepKind.RUN:
            return context, _run(context, step.args)
        case StepKind.COPY:
            return context, _copy(context, step)
        case StepKind.ENV:
            return _env(context, step.args), None
        case StepKind.WORKDIR:
            path = _absolute(_first(step.args, "a directory"), context)
            return replace(context, workdir=path), MakeDirectory(path, context.user)
        case StepKind.USER:
            # Whether there is such an account shows when a command is run as it.
            return replace(context, user=_first(step.args, "a user")), None


def base_key(image: str, context: Context) -> str:
    """The key that the first step's follows from."""
    return _digest([FORMAT, image, context.user, context.workdir, sorted(context.env.items())])


def step_key(previous: str, step: Step) -> str:
    """By what a step after these is known again: what it is given, never when or by which build."""
    return _digest([previous, step.kind.value, list(step.args), step.files_hash])


def expand(text: str, env: Mapping[str, str]) -> str:
    """`$NAME` and `${NAME}` replaced by their values; one that is not set is empty, and a backslash keeps a dollar."""

    def value(match: re.Match[str]) -> str:
        name = match["plain"] or match["braced"]
        return "$" if name is None else env.get(name, "")

    return _VARIABLE.sub(value, text)


def describe(step: Step) -> str:
    """A step in one line, for logs."""
    text = f"{step.kind} {' '.join(step.args)}" if step.kind is not StepKind.ENV else f"ENV {' '.join(step.args[::2])}"
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


def _run(context: Context, args: tuple[str, ...]) -> Run:
    command = _first(args, "a command")
    return Run(command, args[1] if len(args) > 1 and args[1] else context.user)


def _copy(context: Context, step: Step) -> Copy:
    source, target, owner, mode = [*step.args[:4], *[""] * (4 - len(step.args))]
    if not source or not target:
        raise Refused(Code.INVALID_REQUEST, "what is copied, and where to, is missing")
    if step.files_hash is None or not FILES_HASH.fullmatch(step.files_hash):
        raise Refused(Code.INVALID_REQUEST, "filesHash is the SHA-256 of the files, 64 hexadecimal digits")
    source = posixpath.normpath(source)
    if source.startswith(("/", "../")) or source == "..":
        raise Refused(Code.INVALID_REQUEST, f"{source[:200]!r} is not below the directory that files are copied from")
    if owner and not _ACCOUNT.fullmatch(owner):
        raise Refused(Code.INVALID_REQUEST, f"{owner[:80]!r} is no name of a user")
    if mode and not _MODE.fullmatch(mode):
        raise Refused(Code.INVALID_REQUEST, f"{mode[:80]!r} is no octal mode")
    into = "/" if target.endswith("/") or posixpath.basename(target) in (".", "..") else ""
    path = _absolute(target, context)
    return Copy(source, path if path == "/" else path + into, owner or context.user, mode or None, step.files_hash)


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
