"""`atoll template`: what sandboxes are made of."""

from __future__ import annotations

import typer

from atoll.cli import output
from atoll.cli.output import JsonOption
from atoll.cli.session import session

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What sandboxes are made of.")


@app.command("list")
def list_templates(as_json: JsonOption = False) -> None:
    """List the templates that this key can use."""
    with session() as api:
        found = api.templates()
    if as_json:
        output.document({"items": found})
        return
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
    )


def _cores(millis: int | None) -> str | None:
    return None if millis is None else f"{millis / 1000:g}"


def _mib(amount: int | None) -> str | None:
    return None if amount is None else f"{amount} MiB"
