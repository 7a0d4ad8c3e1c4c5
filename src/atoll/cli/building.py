"""`atoll template build`: a directory with a Dockerfile becomes a template, step by step, with progress."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from atoll.base.errors import Code, Refused
from atoll.cli import output, secrets
from atoll.cli.context import TEXT, ignoring
from atoll.cli.dockerfile.reading import read
from atoll.cli.dockerfile.stages import Built, Copied, Mounted, Ran, Stage, Step
from atoll.cli.following import Pages
from atoll.cli.output import JsonOption
from atoll.cli.sending import Parcel, as_copied, check, parcel
from atoll.cli.session import session

if TYPE_CHECKING:
    from atoll.client.api import Api

POLL_S: Final = 0.25
DOCKERFILE: Final = "Dockerfile"


def build_template(  # noqa: PLR0913, PLR0917 - a command has as many options as it needs
    what: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Of the template, with an optional :TAG; one that exists gets a new build. A word alone may be the place."
        ),
    ] = ".",
    place: Annotated[Path | None, typer.Argument(help="A directory with a Dockerfile, or a Dockerfile beside its files.")] = None,
    name: Annotated[str | None, typer.Option("--name", "-t", help="The name, where only a place is given; else the directory's.")] = None,
    cpu: Annotated[int | None, typer.Option(min=1, help="Cores of its sandboxes.")] = None,
    memory_mib: Annotated[int | None, typer.Option("--memory-mib", min=128, help="Memory of its sandboxes, in MiB.")] = None,
    ready_command: Annotated[str | None, typer.Option(help="Ends well once the CMD is of use; sandboxes are ready then.")] = None,
    build_arg: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of an ARG; may be repeated.")] = None,
    target: Annotated[str | None, typer.Option(help="The stage to build, by its name; else the last one.")] = None,
    secret: Annotated[list[str] | None, typer.Option(help="id=ID,src=FILE or id=ID,env=VARIABLE, for RUN --mount=type=secret.")] = None,
    ssh: Annotated[list[str] | None, typer.Option(help="ID=KEYFILE, or KEYFILE for `default`, for RUN --mount=type=ssh.")] = None,
    username: Annotated[str | None, typer.Option(help="For the registry of the first image that the Dockerfile names.")] = None,
    password_stdin: Annotated[bool, typer.Option("--password-stdin", help="Read the registry's password from standard input.")] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Take every step again.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build a template from a Dockerfile: `build NAME PLACE`, `build PLACE --name NAME`, or `build PLACE` for one named after its directory."""
    name, place = meant(what, place, name)
    file = place / DOCKERFILE if place.is_dir() else place
    try:
        text = file.read_text(TEXT)
    except OSError as error:
        raise Refused(Code.INVALID_REQUEST, f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Refused(Code.INVALID_REQUEST, f"{file} is no text in UTF-8") from error
    built = read(text, dict(one.partition("=")[::2] for one in build_arg or ()), target=target)
    for note in built.notes if not as_json else ():
        typer.echo(note, err=True)
    brought = secrets.brought(secret or (), ssh or ())
    secrets.check(built, brought)
    # Before control hears of it: a template that could not be begun would stay there without a build.
    ignored = ignoring(file.parent, file)
    check(file.parent, built, ignored)
    with session() as api:
        asked = api.request_build({"name": name, "cpuCount": cpu, "memoryMB": memory_mib})
        recipe = {**document(api, str(asked["templateID"]), file, built, ignored, quiet=as_json), "force": no_cache}
        if brought.values:
            recipe["secrets"] = brought.values
        if username is not None or password_stdin:
            password = sys.stdin.readline().rstrip("\n") if password_stdin else ""
            recipe["fromImageRegistry"] = {"type": "registry", "username": username or "", "password": password}
        if built.start_command is not None:
            recipe["startCmd"] = built.start_command
        if ready_command is not None:
            recipe["readyCmd"] = ready_command
        api.start_build(asked["templateID"], asked["buildID"], recipe)
        ended = _follow(api, asked, quiet=as_json)
    if ended["status"] != "ready":
        reason = ended.get("reason") or {}
        raise Refused(Code.BUILD_FAILED, f"step {reason.get('step', '?')}: {reason.get('message')}")
    if as_json:
        output.document({"templateId": asked["templateID"], "buildId": asked["buildID"], "tags": asked["tags"]})
        return
    print(asked["templateID"])
    typer.echo(f"Template {name} is ready: atoll sandbox create --template {name}", err=True)


def meant(what: str, place: Path | None, name: str | None) -> tuple[str, Path]:
    """The template's name and its place. One word alone is a place if it looks like one or is there; else it names a build of the directory where we are.

    Raises: Refused for two names, and for a word that may be either.
    """
    if place is not None:
        if name is not None:
            raise Refused(Code.INVALID_REQUEST, f"{what} and --name {name} both name the template")
        return what, place
    word = Path(what)
    looks, there = what.startswith((".", "/", "~")), word.is_file() or (word / DOCKERFILE).is_file()
    if name is None and there and not looks and word != Path(DOCKERFILE) and Path(DOCKERFILE).is_file():
        hint = f"`atoll template build ./{what}` builds {what}, `atoll template build {what} .` the directory where you are."
        raise Refused(Code.INVALID_REQUEST, f"{what} may be a template's name or a place", hint=hint)
    if name is None and not looks and not there:
        return what, Path()
    word = word.expanduser()
    folder = word if word.is_dir() else word.parent
    return name or folder.resolve().name.lower(), word


def document(api: Api, template_id: str, file: Path, built: Built, ignored: Callable[[str], bool], *, quiet: bool) -> dict[str, Any]:
    """The recipe as the API takes it; what its steps copy is sent first, unless it was sent before."""
    sender = _Sender(api, template_id, file.parent, ignored, built, quiet)
    *before, target = [(stage, [sender.step(one) for one in stage.steps]) for stage in built.stages]
    made: dict[str, Any] = {"steps": target[1], **_source(built, target[0])}
    if before:
        made["stages"] = [{"name": stage.name, "steps": steps, **_source(built, stage)} for stage, steps in before]
    return made


def _source(built: Built, stage: Stage) -> dict[str, Any]:
    """What it begins with: an earlier stage; `FROM template:NAME` means a template, anything else an image."""
    if stage.parent is not None:
        return {"fromStage": built.stages.index(stage.parent)}
    kind, colon, name = stage.base.partition(":")
    return {"fromTemplate": name} if kind == "template" and colon else {"fromImage": stage.base}


@dataclass(frozen=True, slots=True)
class _Sender:
    api: Api
    template_id: str
    context: Path
    ignored: Callable[[str], bool]
    built: Built
    quiet: bool

    def step(self, one: Step) -> dict[str, Any]:
        """A step as the API takes it."""
        match one:
            case Copied():
                return self._copied(one)
            case Ran():
                return {"type": "RUN", "args": [one.command], "mounts": [self._mounted(mount) for mount in one.mounts]}
            case word, arguments:
                return {"type": word, "args": arguments}

    def _copied(self, one: Copied) -> dict[str, Any]:
        rest = [one.target, one.owner, one.mode]
        if one.origin is not None:
            return {"type": "COPY", "args": [one.source, *rest], "fromStage": self.built.origins[one.origin.lower()]}
        with parcel(self.context, one, self.ignored) as sent:
            self._send(sent)
            return {"type": sent.word, "args": [sent.source, *rest], "filesHash": sent.files_hash}

    def _mounted(self, one: Mounted) -> dict[str, Any]:
        shown: dict[str, Any] = {"target": one.target, "owner": one.owner, "mode": one.mode}
        if one.kind != "files":
            return {**shown, "kind": one.kind, "id": one.id, "env": one.env, "required": one.required}
        if one.source is None:
            return shown
        if one.origin is not None:
            return {**shown, "source": one.source, "fromStage": self.built.origins[one.origin.lower()]}
        with parcel(self.context, as_copied(one), self.ignored) as sent:
            self._send(sent)
            return {**shown, "source": sent.source, "filesHash": sent.files_hash}

    def _send(self, sent: Parcel) -> None:
        link = self.api.build_files(self.template_id, sent.files_hash)
        if link["present"]:
            return
        if not self.quiet:
            typer.echo(f"sending {sent.source}: {sent.names} names", err=True)
        with tempfile.TemporaryFile() as archive:
            sent.write(archive)
            size = archive.tell()
            archive.seek(0)
            self.api.send_files(str(link["url"]), archive, size=size)


def _follow(api: Api, asked: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Show the log as it grows, until the build has ended and all of it was shown."""
    shown = 0
    pages = Pages(lambda line: print(line, file=sys.stderr), time.monotonic)
    while True:
        now = api.build_status(asked["templateID"], asked["buildID"], offset=shown)
        if not quiet:
            pages.take([(entry.get("step") or "", entry["message"]) for entry in now["logEntries"]])
        shown += len(now["logEntries"])
        if now["status"] in ("ready", "error") and not now["logEntries"]:
            pages.end()
            return now
        if not now["logEntries"]:
            time.sleep(POLL_S)
