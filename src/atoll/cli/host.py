"""`atoll host`: what holds sandboxes, for operators."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from atoll.cli import completion, output
from atoll.cli.output import JsonOption
from atoll.cli.session import session

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What holds sandboxes (operators).")

tokens = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="One-use tokens by which hosts enrol.")
app.add_typer(tokens, name="enrollment-token")

HostArgument = Annotated[str, typer.Argument(help="Id or name.", autocompletion=completion.hosts)]


@app.command("list")
def list_hosts(as_json: JsonOption = False) -> None:
    """List the hosts with their health and what is used of them."""
    with session() as api:
        found = api.hosts()
    if as_json:
        output.document({"items": found})
        return
    output.table(
        [
            ("NAME", lambda item: item.get("name")),
            ("ID", lambda item: item.get("id")),
            ("STATE", lambda item: item.get("admin")),
            ("HEALTH", lambda item: item.get("health")),
            ("ISOLATION", lambda item: item.get("isolations")),
            ("SANDBOXES", lambda item: item.get("sandboxes")),
            ("CPU", lambda item: _share(item, "cpuMillis", 1000, "cores")),
            ("MEMORY", lambda item: _share(item, "memoryMib", 1024, "GiB")),
            ("PROBLEMS", lambda item: item.get("problems")),
        ],
        found,
        empty="No hosts. The agent of this machine enrols itself at `atoll up`.",
    )


@app.command("get")
def get_host(
    host: HostArgument,
    as_json: JsonOption = False,
) -> None:
    """Show one host."""
    with session() as api:
        found = api.host(host)
    if as_json:
        output.document(found)
        return
    output.fields(
        [
            ("name", found.get("name")),
            ("id", found.get("id")),
            ("admin state", found.get("admin")),
            ("health", found.get("health")),
            ("isolation", found.get("isolations")),
            ("problems", found.get("problems")),
            ("sandboxes", found.get("sandboxes")),
            ("capacity", found.get("capacity")),
            ("used", found.get("used")),
            ("architecture", found.get("arch")),
            ("region", found.get("region")),
            ("labels", found.get("labels")),
            ("lease until", output.moment(found.get("leaseUntil"))),
            ("agent version", found.get("agentVersion")),
            ("seen", output.moment(found.get("seenAt"))),
            ("facts", found.get("facts")),
        ]
    )


@app.command("activate")
def activate_host(host: HostArgument, as_json: JsonOption = False) -> None:
    """Let a host take new sandboxes."""
    _set_admin(host, "activate", as_json=as_json)


@app.command("drain")
def drain_host(host: HostArgument, as_json: JsonOption = False) -> None:
    """Give a host no new sandboxes; those that it has go on."""
    _set_admin(host, "drain", as_json=as_json)


@app.command("disable")
def disable_host(
    host: HostArgument,
    off: Annotated[bool, typer.Option("--off", help="The machine is known to be off: count its sandboxes as gone at once.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Fence a host: its credential ends, its sandboxes end, and it must be enrolled again."""
    _set_admin(host, "disable", off=off, as_json=as_json)


@tokens.command("create")
def create_token(
    name: Annotated[str, typer.Argument(help="Name of the host that may enrol with it.")],
    life_s: Annotated[int, typer.Option("--life", min=1, max=3600, help="Seconds until it expires.")] = 3600,
    as_json: JsonOption = False,
) -> None:
    """Make a one-use token by which a host enrols. It is shown once."""
    with session() as api:
        made = api.create_enrollment_token(host_name=name, life_s=life_s)
    if as_json:
        output.document(made)
        return
    print(made["token"])
    typer.echo(f"for host {made['hostName']}, until {output.moment(made['expiresAt'])}; shown this once, kept as a digest.", err=True)


def _set_admin(host: str, verb: str, *, as_json: bool, off: bool = False) -> None:
    with session() as api:
        changed = api.set_host_admin(host, verb, off=off)
    if as_json:
        output.document(changed)
        return
    print(f"{changed['name']} is {changed['admin']}, {changed['sandboxes']} sandboxes on it")


def _share(item: dict[str, Any], name: str, divisor: int, unit: str) -> str | None:
    capacity, used = (item.get("capacity") or {}).get(name), (item.get("used") or {}).get(name)
    return None if capacity is None else f"{(used or 0) / divisor:.1f} of {capacity / divisor:.1f} {unit}"
