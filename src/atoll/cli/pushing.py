"""`atoll template push`: a template as an ordinary container image, in a registry.

Theory of operation. The template's own layers come from control, one after the other, and those that the registry has are not sent. What is
below them, a ready-made image, has no layers: a sandbox of the template that it is is made, and its files come out as one tar through the
guest, always in the same order, so that the next push has the same layer; which one that is is remembered (`packed.py`), and nothing is packed
as long as the repository, or another one of that registry, has it. A template whose ready-made image no template is any more goes
out as one layer, packed in the same way. What is mounted over the files (/proc, /dev, the guest agent) is left out. A layer waits in a
temporary file until its digest is known and it is sent; the sandbox is gone before that. Environment, user, directory and start command of
the template are the image's configuration.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import secrets
import shlex
import sys
import tempfile
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from atoll.base.errors import Code, Refused
from atoll.base.secret import Secret
from atoll.cli import completion, output
from atoll.cli.output import JsonOption
from atoll.cli.packed import Remembered, recall, remember
from atoll.cli.session import session

if TYPE_CHECKING:
    from atoll.client.api import Api
    from atoll.client.guest import Guest
    from atoll.client.registry import Blob, Registry

PASSWORD_VARIABLE: Final = "ATOLL_REGISTRY_PASSWORD"  # noqa: S105 - a name
LIFE_S: Final = 3600
CONFIG: Final = "application/vnd.oci.image.config.v1+json"
LAYER: Final = "application/vnd.oci.image.layer.v1.tar+gzip"
PROCESSORS: Final = {"x86_64": "amd64", "aarch64": "arm64"}
LEFT_OUT: Final = ("./proc", "./sys", "./dev", "./run", "./.atoll", "./tmp", "./etc/resolv.conf", "./etc/hostname", "./etc/hosts")
# Directories that an image's runtimes mount on, empty; `tmp` is anybody's.
PLACES: Final = "for d in proc sys dev run; do mkdir -p $t/$d; done; mkdir -p -m 1777 $t/tmp"


@dataclass(frozen=True, slots=True)
class Packed:
    """A layer, compressed and as a tar. *Units*: bytes."""

    digest: str
    size: int
    tar_digest: str


def push_template(
    template: Annotated[str, typer.Argument(help="Name or id.", autocompletion=completion.templates)],
    reference: Annotated[str, typer.Argument(help="REGISTRY/REPOSITORY:TAG.")],
    username: Annotated[str | None, typer.Option(help="For a registry that is not this deployment's.")] = None,
    password_stdin: Annotated[
        bool,
        typer.Option("--password-stdin", help=f"Read the registry's password from standard input; otherwise it is ${PASSWORD_VARIABLE}."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Push a template to a registry, as an ordinary container image."""
    from atoll.client.registry import Blob, Place, Registry

    place = Place.parse(reference)
    password = _password(stdin=password_stdin)
    with session() as api:
        found = api.template(template)
        account = (username or "anybody", password)
        if password is None and username is None and place.address in _own_addresses(api):
            account = ("anybody", api.target.key)
        with Registry(place, username=account[0], password=account[1]) as registry:
            # A wrong password is said before anything is packed.
            registry.has("sha256:" + "0" * 64)
            sender = _Sender(api, registry, found, quiet=as_json)
            tars, processor = sender.send()
            config = json.dumps(_configuration(found, processor, tars)).encode()
            its = Blob(CONFIG, "sha256:" + hashlib.sha256(config).hexdigest(), len(config))
            registry.blob(its, config)
            digest = registry.manifest(its, sender.layers)
    if as_json:
        sizes = {"sizeBytes": sum(one.size for one in sender.layers), "sentBytes": sender.sent_bytes, "layers": len(sender.layers)}
        output.document({"reference": str(place), "digest": digest, **sizes})
        return
    print(digest)
    typer.echo(f"{found['name']} is {place}", err=True)


@dataclass(slots=True)
class _Sender:
    """Has a template's layers in a registry. *Units*: bytes."""

    api: Api
    registry: Registry
    template: dict[str, Any]
    quiet: bool
    layers: list[Blob] = field(default_factory=list)
    sent_bytes: int = 0

    def send(self) -> tuple[list[str], str]:
        """The digests of the layers' tars, from below, and the processor that the files are for."""
        image = self.api.template_image(str(self.template["id"]))
        below: dict[str, Any] | None = self.template
        own: list[dict[str, Any]] = []
        if image["layers"]:
            # None: nothing is below; else whichever template is that image.
            same = (one for one in self.api.templates() if one["image"] == image["base"])
            ready = next(same, None) if image["base"] is not None else None
            if ready is not None or image["base"] is None:
                below, own = ready, image["layers"]
        tars, processor = [], str(image["architecture"])
        if below is not None and (known := self._known(below)) is not None:
            processor = known.processor
            tars.append(known.tar_digest)
        elif below is not None:
            with tempfile.TemporaryFile() as file:
                packed, processor = _packed(self.api, below, cast("IO[bytes]", file), quiet=self.quiet)
                self._one(LAYER, packed.digest, packed.size, cast("IO[bytes]", file))
                made = Remembered(packed.digest, packed.size, packed.tar_digest, processor)
                remember(_age(below), made, self.registry.repository)
                tars.append(packed.tar_digest)
        for one in own:
            if self.registry.has(one["digest"]):
                self._note(one["mediaType"], one["digest"], one["sizeBytes"])
            else:
                with tempfile.TemporaryFile() as file:
                    self.api.template_layer(str(self.template["id"]), one["digest"], cast("IO[bytes]", file))
                    self._one(one["mediaType"], one["digest"], one["sizeBytes"], cast("IO[bytes]", file))
            tars.append(one["tarDigest"])
        return tars, processor

    def _known(self, below: dict[str, Any]) -> Remembered | None:
        """The layer that it was packed as before, where the repository has it, or takes it from another one of its registry."""
        known = recall(_age(below))
        if known is None:
            return None
        if not self.registry.has(known.digest):
            here = self.registry.repository.partition("/")[0] + "/"
            others = [one.removeprefix(here) for one in known.repositories if one.startswith(here)]
            if not any(self.registry.mount(known.digest, other) for other in others):
                return None
        remember(_age(below), known, self.registry.repository)
        self._note(LAYER, known.digest, known.size)
        return known

    def _one(self, kind: str, digest: str, size: int, file: IO[bytes]) -> None:
        blob = self._note(kind, digest, size)
        if self.registry.has(digest):
            return
        if not self.quiet:
            typer.echo(f"sending {size} bytes: layer {len(self.layers)}", err=True)
        file.seek(0)
        self.registry.blob(blob, file)
        self.sent_bytes += size

    def _note(self, kind: str, digest: str, size: int) -> Blob:
        from atoll.client.registry import Blob

        self.layers.append(Blob(kind, digest, size))
        return self.layers[-1]


def _age(template: dict[str, Any]) -> str:
    """By what it is known again: the same files, packed with the same times."""
    return f"{template['image']} {template['updatedAt']}"


def _password(*, stdin: bool) -> Secret | None:
    if stdin:
        return Secret(sys.stdin.readline().rstrip("\n"))
    found = os.environ.get(PASSWORD_VARIABLE)
    return Secret(found) if found else None


def _own_addresses(api: Api) -> tuple[str, ...]:
    """Under which this deployment's registry is reached: it is at the API's address."""
    from urllib.parse import urlsplit

    own = urlsplit(api.target.url)
    port = f":{own.port}" if own.port else ""
    return (own.netloc, f"localhost{port}", f"127.0.0.1{port}") if own.hostname in ("localhost", "127.0.0.1") else (own.netloc,)


def _packed(api: Api, template: dict[str, Any], into: IO[bytes], *, quiet: bool) -> tuple[Packed, str]:
    """The template's files as a compressed tar, and its processor in the images' words."""
    sandbox = api.create_sandbox(
        request_id=f"push-{secrets.token_hex(16)}", template=str(template["id"]), timeout_s=LIFE_S, metadata={"for": "template push"}
    )
    try:
        with api.guest(sandbox) as guest:
            machine = guest.run(["/bin/uname", "-m"], user="root").stdout.decode().strip()
            if not quiet:
                typer.echo(f"packing {template['name']}", err=True)
            return _pack(guest, into, at=str(template["updatedAt"])), PROCESSORS.get(machine, machine)
    finally:
        api.release(str(sandbox["id"]))


def _pack(guest: Guest, into: IO[bytes], *, at: str) -> Packed:
    """`at`: what the sandbox itself has made since is as old as its template, so that the same files make the same layer."""
    from atoll.client.guest import Ended, Output, Started

    places = f"/tmp/.atoll-push-{secrets.token_hex(8)}"  # noqa: S108 - inside the sandbox, with a name nobody can guess
    without = " ".join(f"--exclude={one}" for one in LEFT_OUT)
    how = f"--numeric-owner --one-file-system --sort=name --clamp-mtime --mtime={shlex.quote(at)}"
    script = f"t={places}; {PLACES}; cd / && tar -c {how} {without} -f - . -C {places} proc sys dev run tmp"
    whole, failed, status = hashlib.sha256(), bytearray(), None
    with (
        gzip.GzipFile(fileobj=into, mode="wb", compresslevel=4, mtime=0) as packed,
        guest.start(["/bin/sh", "-c", script], user="root") as events,
    ):
        for event in events:
            match event:
                case Output(stream="stdout", data=data):
                    whole.update(data)
                    packed.write(data)
                case Output(data=data):
                    failed += data[: max(0, 2000 - len(failed))]
                case Ended(exit_code=code):
                    status = code
                case Started():
                    pass
    # 1: a file changed while it was read, as a start command's may.
    if status not in (0, 1):
        words = failed.decode(errors="replace").strip()
        raise Refused(Code.IMAGE_REFUSED, f"packing the template's files failed with status {status}: {words}", hint="It needs tar inside.")
    into.flush()
    size = into.tell()
    into.seek(0)
    return Packed("sha256:" + hashlib.file_digest(into, "sha256").hexdigest(), size, "sha256:" + whole.hexdigest())  # type: ignore[arg-type]


def _configuration(template: dict[str, Any], processor: str, tars: list[str]) -> dict[str, Any]:
    env: dict[str, str] = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **(template.get("env") or {})}
    config: dict[str, Any] = {"Env": [f"{name}={value}" for name, value in env.items()], "User": template["defaultUser"]}
    if template.get("defaultWorkdir"):
        config["WorkingDir"] = template["defaultWorkdir"]
    if template.get("startCommand"):
        config["Cmd"] = template["startCommand"]
    return {
        "created": template["updatedAt"],
        "architecture": processor,
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": tars},
        "history": [{"created": template["updatedAt"], "created_by": f"atoll template push {template['name']}"} for _ in tars],
    }
