"""`atoll snapshot`: see and remove kept moments of sandboxes; `atoll sandbox snapshot` and `fork` make them."""

from __future__ import annotations

import secrets
import sys
from typing import Annotated, Any

import typer

from atoll.base.errors import AtollError
from atoll.cli import arguments, completion, output
from atoll.cli.output import JsonOption
from atoll.cli.session import session

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="See and remove kept moments of sandboxes.")

SandboxArgument = Annotated[str, typer.Argument(metavar="SANDBOX", help="Id of the sandbox.", autocompletion=completion.sandboxes)]


@app.command("list")
def list_snapshots(
    sandbox: Annotated[str | None, typer.Option(help="Only of this sandbox.", autocompletion=completion.sandboxes)] = None,
    name: Annotated[str | None, typer.Option(help="Only of this name.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the team's snapshots, newest first. `atoll sandbox create --template ID` begins from one."""
    with session() as api:
        found = api.snapshots(sandbox=sandbox, name=name)
    output.table(
        [
            ("ID", lambda item: item.get("id")),
            ("NAME", _name),
            ("KEEPS", lambda item: item.get("mode")),
            ("MIB", lambda item: -(-int(item.get("bytes") or 0) >> 20)),
            ("SANDBOX", lambda item: item.get("sandboxId")),
            ("HOST", lambda item: item.get("hostId")),
            ("AGE", lambda item: output.age(item.get("createdAt"))),
        ],
        found,
        empty="No snapshots.",
        as_json=as_json,
    )


def _name(item: dict[str, Any]) -> str | None:
    return f"{item['name']}:{item['tag']} ({item['version']})" if item.get("name") else None


@app.command("rm")
def remove(
    snapshots: Annotated[list[str], typer.Argument(metavar="SNAPSHOT...", help="Ids, or NAME[:TAG]: the newest of that.")],
    as_json: JsonOption = False,
) -> None:
    """Remove snapshots; refused while sandboxes that began from them live."""
    done: list[dict[str, Any]] = []
    worst: AtollError | None = None
    with session() as api:
        for reference in snapshots:
            try:
                done.append({"id": api.delete_snapshot(reference)["id"], "removed": True})
            except AtollError as error:
                worst = error
                done.append({"id": reference, "removed": False, "error": output.error_of(error)})
    output.show_items(done, lambda item: str(item["id"]), as_json=as_json)
    if worst is not None:
        raise typer.Exit(int(output.exit_code(worst)))


def take(
    sandbox: SandboxArgument,
    name: Annotated[str | None, typer.Option(help="NAME[:TAG]; the next one of it is its next version.")] = None,
    files_only: Annotated[bool, typer.Option("--files-only", help="Keep files alone; what begins from it boots.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Keep what a running sandbox is now, and print the snapshot's id. It goes on. Says where only files could be kept."""
    with session() as api:
        taken = api.take_snapshot(sandbox, name=name, memory=not files_only)
    if as_json:
        output.document(taken)
        return
    print(taken["id"])
    if taken["mode"] != "full" and not files_only:
        print("Files alone were kept: this sandbox's host cannot keep memory.", file=sys.stderr)


def fork(
    sandbox: SandboxArgument,
    count: Annotated[int, typer.Option(min=1, max=100, help="How many clones.")] = 1,
    timeout: Annotated[
        str | None, typer.Option(help="They end by themselves after this: 90s, 5m, 2h; otherwise as their parent was created.")
    ] = None,
    request_id: Annotated[str | None, typer.Option(help="Repeating a fork with the same id gives the same clones.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Clone a running sandbox: memory and files of one moment. Prints the clones' ids; the parent goes on."""
    with session() as api:
        life_s = arguments.duration_s(timeout) if timeout is not None else None
        made = api.fork(sandbox, count=count, timeout_s=life_s, request_id=request_id or f"cli-{secrets.token_hex(12)}")
    output.show_items(made, lambda item: str(item["sandbox"]["id"]), as_json=as_json)
    if any(item.get("error") for item in made):
        raise typer.Exit(int(output.Exit.FAILED))
