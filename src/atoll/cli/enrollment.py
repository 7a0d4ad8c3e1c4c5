"""`atoll host enrollment-token`: one-use tokens by which machines become hosts, and the command that uses one."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from atoll.cli import arguments, output
from atoll.cli.output import JsonOption
from atoll.cli.session import session

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="One-use tokens by which hosts enrol.")


@app.command("create")
def create_token(
    name: Annotated[str, typer.Argument(help="Name of the host that may enrol with it.")],
    ttl: Annotated[str, typer.Option("--ttl", help="How long it is good: 90s, 15m, at most 1h.")] = "1h",
    as_json: JsonOption = False,
) -> None:
    """Make a one-use token by which one machine becomes a host. It is shown once; how to use it is said beside it."""
    with session() as api:
        made = api.create_enrollment_token(host_name=name, life_s=arguments.duration_s(ttl))
        command = join_command(api.well_known(), name=name, url=api.target.url)
    if as_json:
        output.document({**made, "join": command})
        return
    print(made["token"])
    typer.echo(f"For host {made['hostName']}, until {output.moment(made['expiresAt'])}; shown this once, kept as a digest.", err=True)
    typer.echo("On that machine, as root, and paste the token when it asks:", err=True)
    typer.echo(f"  {command}", err=True)
    if _local(command):
        typer.echo("That address is this machine's own; `atoll control listen --help` says how others get here.", err=True)


def join_command(document: dict[str, Any], *, name: str, url: str) -> str:
    """What a machine runs to join where this well-known document comes from. The token is never in it: it would be seen by everybody there."""
    urls = [str(one) for one in document.get("agents_urls") or []]
    words = ["atoll", "agent", "join", urls[0] if urls else url, "--name", name]
    authority = document.get("ca_pem")
    if authority:
        words += ["--ca-pin", pin(str(authority))]
    return shlex.join(words)


def pin(certificate_pem: str) -> str:
    """The fingerprint of a certificate, as `--ca-pin` takes it. *Errors*: ValueError when it is none."""
    import hashlib
    import ssl

    return "sha256:" + hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate_pem)).hexdigest()


def _local(command: str) -> bool:
    return any(f"://{host}" in command for host in ("127.", "localhost", "[::1]"))
