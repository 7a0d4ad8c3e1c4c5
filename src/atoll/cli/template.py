"""`atoll template`: what sandboxes are made of."""

from __future__ import annotations

from typing import Annotated

import typer

from atoll.cli import building, completion, importing, output, pushing, warm
from atoll.cli.output import JsonOption
from atoll.cli.session import session

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What sandboxes are made of.")
app.command("build")(building.build_template)
app.command("import")(importing.import_template)
app.command("push")(pushing.push_template)
app.command("warm")(warm.warm_template)


@app.command("list")
def list_templates(as_json: JsonOption = False) -> None:
    """List the templates that this key can use."""
    with session() as api:
        found = api.templates()
    output.table(
        [
            ("NAME", lambda item: item.get("name")),
            ("ID", lambda item: item.get("id")),
            ("CPU", lambda item: _cores(item.get("cpuMillis"))),
            ("MEMORY", lambda item: _mib(item.get("memoryMib"))),
            ("DISK", lambda item: _mib(item.get("diskMib"))),
            ("PUBLIC", lambda item: "yes" if item.get("public") else "no"),
            ("UPDATED", lambda item: output.moment(item.get("updatedAt"))),
        ],
        [{**item, **(item.get("size") or {})} for item in found],
        empty="No templates.",
        as_json=as_json,
    )


@app.command("get")
def get_template(
    reference: Annotated[str, typer.Argument(help="Name or id.", autocompletion=completion.templates)],
    as_json: JsonOption = False,
) -> None:
    """Show one template."""
    with session() as api:
        found = api.template(reference)
    if as_json:
        output.document(found)
        return
    size = found.get("size") or {}
    output.fields(
        [
            ("name", found.get("name")),
            ("id", found.get("id")),
            ("image", found.get("image")),
            ("source", found.get("source") or "ready-made"),
            ("cpu", _cores(size.get("cpuMillis"))),
            ("memory", _mib(size.get("memoryMib"))),
            ("disk", _mib(size.get("diskMib"))),
            ("user", found.get("defaultUser")),
            ("directory", found.get("defaultWorkdir")),
            ("start command", " ".join(found.get("startCommand") or []) or None),
            ("public", "yes" if found.get("public") else "no"),
            ("updated", output.moment(found.get("updatedAt"))),
        ]
    )


@app.command("delete")
def delete_template(
    reference: Annotated[str, typer.Argument(help="Name or id.", autocompletion=completion.templates)],
    as_json: JsonOption = False,
) -> None:
    """Take a template away; refused while sandboxes use it."""
    with session() as api:
        gone = api.delete_template(reference)
    if as_json:
        output.document(gone)
        return
    typer.echo(f"{gone['name']} is deleted.", err=True)


def _cores(millis: int | None) -> str | None:
    return None if millis is None else f"{millis / 1000:g}"


def _mib(amount: int | None) -> str | None:
    return None if amount is None else f"{amount} MiB"
