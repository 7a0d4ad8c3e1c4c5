"""`atoll template import`: an image from a registry, a layout or an archive becomes a template."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final

import typer

from atoll.base.errors import Code, Refused
from atoll.cli import arguments, output
from atoll.cli.output import JsonOption
from atoll.cli.session import session

if TYPE_CHECKING:
    from atoll.client.api import Api

POLL_S: Final = 0.3
CHUNK_BYTES: Final = 1 << 20
LAYOUT: Final = "oci-layout:"
ARCHIVE: Final = "docker-archive:"
REGISTRY: Final = "registry:"

SourceArgument = Annotated[
    str,
    typer.Argument(help="A registry's reference (docker.io/library/debian:12), oci-layout:DIR[:TAG], or docker-archive:FILE[:TAG]."),
]


def import_template(
    name: Annotated[str, typer.Argument(help="Of the template; one that exists gets a new build.")],
    source: SourceArgument,
    size: Annotated[str | None, typer.Option(help="CPU,MEMORY,DISK: 2,1G,4G. Otherwise 1,512M,2G.")] = None,
    start_command: Annotated[str | None, typer.Option(help="Runs in each new sandbox, by /bin/sh.")] = None,
    public: Annotated[bool, typer.Option("--public", help="For every team (operators only).")] = False,
    username: Annotated[str | None, typer.Option(help="For the registry.")] = None,
    password_stdin: Annotated[bool, typer.Option("--password-stdin", help="Read the registry's password from standard input.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a template of a container image."""
    body: dict[str, Any] = {"name": name, "public": public, "size": arguments.size(size)}
    if start_command is not None:
        body["startCommand"] = start_command
    if username is not None or password_stdin:
        password = sys.stdin.readline().rstrip("\n") if password_stdin else ""
        body["credentials"] = {"username": username or "", "password": password}
    with session() as api:
        body["source"] = _source(api, source, quiet=as_json)
        ended = _follow(api, api.begin_import(body), quiet=as_json)
        if ended["state"] == "failed":
            code = ended.get("code")
            raise Refused(Code(code) if code in {one.value for one in Code} else Code.INTERNAL, str(ended.get("message")))
        made = api.template(str(ended["templateId"]))
    if as_json:
        output.document({"import": ended, "template": made})
        return
    print(made["id"])
    typer.echo(f"Template {name} is ready: atoll sandbox create --template {name}", err=True)


def _source(api: Api, text: str, *, quiet: bool) -> str:
    """What the API is told: a reference as it is; a layout or an archive is sent first."""
    for prefix in (LAYOUT, ARCHIVE):
        if text.startswith(prefix):
            path, tag = _split(text.removeprefix(prefix))
            if not quiet:
                typer.echo(f"sending {path}", err=True)
            archive = api.upload_archive(_directory(path) if path.is_dir() else _file(path))
            return f"archive:{archive}" + (f":{tag}" if tag else "")
    return REGISTRY + text.removeprefix(REGISTRY)


def _split(text: str) -> tuple[Path, str]:
    """Path and tag. A path may have colons of its own, so the whole of it is tried first."""
    if Path(text).exists():
        return Path(text), ""
    head, colon, tag = text.rpartition(":")
    if colon and Path(head).exists():
        return Path(head), tag
    raise typer.BadParameter(f"{text} is not there")


def _file(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(CHUNK_BYTES):
            yield part


def _directory(path: Path) -> Iterator[bytes]:
    """The directory as a tar, made as it is read: files only, with names relative to it."""
    inlet, outlet = os.pipe()
    failures: queue.SimpleQueue[OSError] = queue.SimpleQueue()
    writer = threading.Thread(target=_pack, args=(path, os.fdopen(outlet, "wb"), failures), daemon=True)
    writer.start()
    with os.fdopen(inlet, "rb") as pipe:
        while part := pipe.read(CHUNK_BYTES):
            yield part
    writer.join()
    if not failures.empty():
        raise failures.get()


def _pack(path: Path, pipe: IO[bytes], failures: queue.SimpleQueue[OSError]) -> None:
    try:
        with contextlib.closing(pipe), tarfile.open(fileobj=pipe, mode="w|") as tar:
            for file in sorted(path.rglob("*")):
                if file.is_file():
                    tar.add(file, arcname=str(file.relative_to(path)), recursive=False)
    except BrokenPipeError:
        return  # whoever read it has gone, and says why
    except OSError as error:
        failures.put(error)


def _follow(api: Api, one: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Wait until the import has ended, showing its log as it grows."""
    shown = 0
    while True:
        for line in one["log"][shown:] if not quiet else ():
            typer.echo(line, err=True)
        shown = len(one["log"])
        if one["state"] != "running":
            return one
        time.sleep(POLL_S)
        one = api.template_import(str(one["id"]))
