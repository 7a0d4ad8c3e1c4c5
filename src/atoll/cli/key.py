"""`atoll key`: credentials of the team."""

from __future__ import annotations

from typing import Annotated

import typer

from atoll.cli import completion, output
from atoll.cli.output import JsonOption
from atoll.cli.session import session

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="API keys of the team.")


@app.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="What it is for, so that people can tell keys apart.")],
    operator: Annotated[
        bool, typer.Option("--operator", help="May manage hosts, keys and every team's sandboxes (operators only).")
    ] = False,
    team: Annotated[
        str | None, typer.Option(help="For this team instead of your own; made when it does not exist (operators only).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key. It is shown once: keep it."""
    with session() as api:
        made = api.create_key(name=name, role="operator" if operator else "member", team=team)
    if as_json:
        output.document(made)
        return
    print(made["secret"])
    typer.echo(f"{made['key']['id']}: shown this once, kept as a digest.", err=True)


@app.command("list")
def list_keys(as_json: JsonOption = False) -> None:
    """List the team's keys, without the keys themselves."""
    with session() as api:
        found = api.keys()
    output.table(
        [
            ("ID", lambda item: item.get("id")),
            ("NAME", lambda item: item.get("name")),
            ("ROLE", lambda item: item.get("role")),
            ("ENDS WITH", lambda item: item.get("hint")),
            ("CREATED", lambda item: output.moment(item.get("createdAt"))),
            ("LAST USED", lambda item: output.moment(item.get("lastUsedAt"))),
            ("REVOKED", lambda item: output.moment(item.get("revokedAt"))),
        ],
        found,
        empty="No keys.",
        as_json=as_json,
    )


@app.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(metavar="KEY", help="Id of the key (`atoll key list`).", autocompletion=completion.keys)],
    as_json: JsonOption = False,
) -> None:
    """Refuse a key from now on. Sandboxes made with it go on."""
    with session() as api:
        revoked = api.revoke_key(key_id)
    if as_json:
        output.document(revoked)
        return
    print(f"{key_id} revoked")
