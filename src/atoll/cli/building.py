"""`atoll template build`: a directory with a Dockerfile becomes a template, step by step, with progress."""

from __future__ import annotations

import hashlib
import re
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from atoll.base.errors import Code, Refused
from atoll.cli import dockerfile, output
from atoll.cli.dockerfile import Built, Copied
from atoll.cli.output import JsonOption
from atoll.cli.session import session

if TYPE_CHECKING:
    from atoll.client.api import Api

POLL_S: Final = 0.25
DOCKERFILE: Final = "Dockerfile"
IGNORE: Final = ".dockerignore"


def build_template(
    name: Annotated[str, typer.Argument(help="Of the template, with an optional :TAG; one that exists gets a new build.")],
    place: Annotated[Path, typer.Argument(help="A directory with a Dockerfile, or a Dockerfile beside its files.")] = Path(),
    cpu: Annotated[int | None, typer.Option(min=1, help="Cores of its sandboxes.")] = None,
    memory_mib: Annotated[int | None, typer.Option("--memory-mib", min=128, help="Memory of its sandboxes, in MiB.")] = None,
    ready_command: Annotated[str | None, typer.Option(help="Ends well once the CMD is of use; sandboxes are ready then.")] = None,
    build_arg: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of an ARG; may be repeated.")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Take every step again.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build a template from a Dockerfile."""
    file = place / DOCKERFILE if place.is_dir() else place
    try:
        text = file.read_text()
    except OSError as error:
        raise Refused(Code.INVALID_REQUEST, f"{file} cannot be read: {error.strerror}") from error
    built = dockerfile.read(text, dict(one.partition("=")[::2] for one in build_arg or ()))
    for note in built.notes if not as_json else ():
        typer.echo(note, err=True)
    with session() as api:
        asked = api.request_build({"name": name, "cpuCount": cpu, "memoryMB": memory_mib})
        steps = [_step(api, str(asked["templateID"]), file.parent, one, quiet=as_json) for one in built.steps]
        recipe: dict[str, Any] = {"steps": steps, "force": no_cache, **_source(built)}
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


def _source(built: Built) -> dict[str, str]:
    """What it begins with: `FROM template:NAME` means a template, anything else an image."""
    kind, colon, name = built.from_image.partition(":")
    return {"fromTemplate": name} if kind == "template" and colon else {"fromImage": built.from_image}


def _step(api: Api, template_id: str, context: Path, one: tuple[str, list[str]] | Copied, *, quiet: bool) -> dict[str, Any]:
    """A step as the API takes it; what it copies is sent first, unless it was sent before."""
    if not isinstance(one, Copied):
        word, arguments = one
        return {"type": word, "args": arguments}
    files = list(chosen(context, one.source))
    if not files:
        raise Refused(Code.INVALID_REQUEST, f"COPY {one.source}: {context} has nothing of that name")
    files_hash = digest(context, files, one)
    link = api.build_files(template_id, files_hash)
    if not link["present"]:
        if not quiet:
            typer.echo(f"sending {one.source}: {len(files)} names", err=True)
        with tempfile.TemporaryFile() as archive:
            with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=1) as tar:
                for path in files:
                    tar.add(path, arcname=str(path.relative_to(context)), recursive=False)
            size = archive.tell()
            archive.seek(0)
            api.send_files(str(link["url"]), archive, size=size)
    return {"type": "COPY", "args": [one.source, one.target, one.owner, one.mode], "filesHash": files_hash}


def chosen(context: Path, source: str) -> Iterator[Path]:
    """The files and directories that a COPY means, in order, without what `.dockerignore` leaves out. Links are not followed."""
    ignored = _ignored(context)
    roots = [context] if source in (".", "./") else sorted(context.glob(source.rstrip("/")))
    for root in roots:
        below = sorted(root.rglob("*")) if root.is_dir() and not root.is_symlink() else []
        for path in [*([] if root == context else [root]), *below]:
            if not ignored(path.relative_to(context).as_posix()):
                yield path


def digest(context: Path, files: Iterable[Path], one: Copied) -> str:
    """By what the files of a step are known again: names, modes and contents; not when they were written."""
    total = hashlib.sha256(repr((one.source, one.target)).encode())
    for path in files:
        info = path.lstat()
        total.update(repr((path.relative_to(context).as_posix(), info.st_mode)).encode())
        if path.is_symlink():
            total.update(str(path.readlink()).encode())
        elif path.is_file():
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _ignored(context: Path) -> Any:
    """Whether a name is left out: the last pattern that fits it, or a directory above it, decides."""
    patterns: list[tuple[bool, re.Pattern[str]]] = []
    file = context / IGNORE
    for line in file.read_text().splitlines() if file.is_file() else ():
        text = line.strip()
        if text and not text.startswith("#"):
            keeps = text.startswith("!")
            patterns.append((keeps, _pattern(text.lstrip("!").strip("/"))))

    def left_out(name: str) -> bool:
        out = False
        for keeps, pattern in patterns:
            if pattern.match(name):
                out = not keeps
        return out

    return left_out


def _pattern(text: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/?|\*|\?)", text)
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(words.get(part, re.escape(part)) for part in parts) + r"(?:/.*)?\Z")


def _follow(api: Api, asked: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Show the log as it grows, until the build has ended and all of it was shown."""
    shown = 0
    while True:
        now = api.build_status(asked["templateID"], asked["buildID"], offset=shown)
        for entry in now["logEntries"]:
            if not quiet:
                print(entry["message"], file=sys.stderr)
        shown += len(now["logEntries"])
        if now["status"] in ("ready", "error") and not now["logEntries"]:
            return now
        if not now["logEntries"]:
            time.sleep(POLL_S)
