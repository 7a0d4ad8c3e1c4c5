"""`atoll registry`: what an operator does with the registry of images of this machine."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

import typer

from atoll.base.errors import Code, Unavailable
from atoll.cli import output
from atoll.cli.output import JsonOption
from atoll.programs import instance, probes
from atoll.programs.layout import layout_of
from atoll.programs.users import require_root

COLLECT_S: Final = 3600.0

app = typer.Typer(help="The registry of container images, at the instance's own address.", no_args_is_help=True)


@app.command("gc")
def gc(
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove blobs that no image refers to, and that nobody has counted on for a day. Pushes and pulls go on meanwhile."""
    require_root("atoll registry gc")
    target = "/-/collect?dry_run=" + ("true" if dry_run else "false")
    status, body = probes.over_socket(layout_of().registry_socket, "POST", target, timeout_s=COLLECT_S)
    if status != 200:
        raise Unavailable(Code.NOT_RUNNING, f"the registry did not collect: {_why(body) if status else body}")
    done: dict[str, Any] = json.loads(body)
    if as_json:
        output.document(done)
        return
    said = "would be removed" if dry_run else "removed"
    print(f"{len(done['blobs'])} blobs, {done['bytes']} bytes {said}; {done['kept']} are kept because they were counted on lately")


@app.command("status")
def status(*, as_json: JsonOption = False) -> None:
    """Whether the registry answers, where to log in, and what each team keeps."""
    place = layout_of()
    config = instance.load(place)
    view = probes.look("registry", place, config)
    code, body = probes.over_socket(place.registry_socket, "GET", "/-/usage", timeout_s=COLLECT_S) if view.healthy else (0, "")
    teams: dict[str, int] = json.loads(body)["teams"] if code == 200 else {}
    found = {"healthy": view.healthy, "pid": view.pid, "address": config.domain, "detail": view.detail, "teams": teams}
    if as_json:
        output.document(found)
        return
    print(f"{'healthy' if view.healthy else view.detail}; docker login {config.domain} (any user, a team's API key as password)")
    for team, size in sorted(teams.items()):
        print(f"{team}: {size} bytes")


def _why(body: str) -> str:
    try:
        return str(json.loads(body)["errors"][0]["message"])
    except (ValueError, KeyError, IndexError, TypeError):
        return body[:200]
