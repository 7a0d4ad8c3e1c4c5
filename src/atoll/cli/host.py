"""`atoll host`: what holds sandboxes, for operators."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from atoll.cli import completion, output
from atoll.cli.output import JsonOption
from atoll.cli.session import session

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What holds sandboxes (operators).")


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
    host: Annotated[str, typer.Argument(help="Id or name.", autocompletion=completion.hosts)],
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


def _share(item: dict[str, Any], name: str, divisor: int, unit: str) -> str | None:
    capacity, used = (item.get("capacity") or {}).get(name), (item.get("used") or {}).get(name)
    return None if capacity is None else f"{(used or 0) / divisor:.1f} of {capacity / divisor:.1f} {unit}"
