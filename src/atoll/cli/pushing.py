"""`atoll template push`: a template as an ordinary container image, in a registry.

Theory of operation. A sandbox of the template is made for it, and its files come out as one tar through the guest, whatever the host's
isolation and wherever its layers are: one layer, with the template's environment, user, directory and start command as its configuration.
What is mounted over the template's files (/proc, /dev, the guest agent) is left out. The layer waits in a temporary file until its digest is
known, is sent, and the sandbox is gone before that.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import secrets
import sys
import tempfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from atoll.base.errors import Code, Refused
from atoll.base.secret import Secret
from atoll.cli import completion, output
from atoll.cli.output import JsonOption
from atoll.cli.session import session

if TYPE_CHECKING:
    from atoll.client.api import Api
    from atoll.client.guest import Guest
    from atoll.client.registry import Blob

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
    with session() as api, tempfile.TemporaryFile() as layer:
        found = api.template(template)
        account = (username or "anybody", password)
        if password is None and username is None and place.address in _own_addresses(api):
            account = ("anybody", api.target.key)
        with Registry(place, username=account[0], password=account[1]) as registry:
            # A wrong password is said before anything is packed.
            registry.has("sha256:" + "0" * 64)
            packed, processor = _packed(api, found, cast("IO[bytes]", layer), quiet=as_json)
            config = json.dumps(_configuration(found, processor, packed)).encode()
            its = Blob(CONFIG, "sha256:" + hashlib.sha256(config).hexdigest(), len(config))
            layers: list[Blob] = [Blob(LAYER, packed.digest, packed.size)]
            if not as_json:
                typer.echo(f"sending {packed.size} bytes to {place}", err=True)
            layer.seek(0)
            registry.blob(layers[0], cast("IO[bytes]", layer))
            registry.blob(its, config)
            digest = registry.manifest(its, layers)
    if as_json:
        output.document({"reference": str(place), "digest": digest, "sizeBytes": packed.size})
        return
    print(digest)
    typer.echo(f"{found['name']} is {place}", err=True)


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
            return _pack(guest, into), PROCESSORS.get(machine, machine)
    finally:
        api.release(str(sandbox["id"]))


def _pack(guest: Guest, into: IO[bytes]) -> Packed:
    from atoll.client.guest import Ended, Output, Started

    places = f"/tmp/.atoll-push-{secrets.token_hex(8)}"  # noqa: S108 - inside the sandbox, with a name nobody can guess
    without = " ".join(f"--exclude={one}" for one in LEFT_OUT)
    how = "--numeric-owner --one-file-system --sort=name"
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


def _configuration(template: dict[str, Any], processor: str, packed: Packed) -> dict[str, Any]:
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
        "rootfs": {"type": "layers", "diff_ids": [packed.tar_digest]},
        "history": [{"created": template["updatedAt"], "created_by": f"atoll template push {template['name']}"}],
    }
