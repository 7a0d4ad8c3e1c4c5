"""`atoll template warm`: guests that are made ahead, so that creates of a template need not wait for one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from atoll.cli import arguments, completion, output
from atoll.cli.output import JsonOption
from atoll.cli.session import session
from atoll.domain.warmth import COUNT_MAX


def warm_template(
    reference: Annotated[
        str | None, typer.Argument(help="Name or id; left out: show what is kept warm.", autocompletion=completion.templates)
    ] = None,
    count: Annotated[int | None, typer.Option(min=0, max=COUNT_MAX, help="How many are kept ready; 0: none any more.")] = None,
    size: Annotated[str | None, typer.Option(help="CPU,MEMORY,DISK: 2,1G,4G. Otherwise as a create that names none.")] = None,
    class_name: Annotated[str | None, typer.Option("--class", help="Of the deployment document; otherwise the default one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Keep guests of a template ready, which creates take over in milliseconds (operators only)."""
    if reference is None or count is None:
        _show(reference, as_json=as_json)
        return
    body: dict[str, Any] = {"count": count, "size": arguments.size(size)}
    if class_name is not None:
        body["class"] = class_name
    with session() as api:
        kept = api.keep_warm(reference, body)
    if as_json:
        output.document(kept)
        return
    said = f"{count} guests of {kept['template']} are kept ready" if count else f"None of {kept['template']} is kept ready any more"
    typer.echo(f"{said}. `atoll template warm` shows how many there are.", err=True)


def _show(reference: str | None, *, as_json: bool) -> None:
    with session() as api:
        found = [one for one in api.warm() if reference in (None, one["template"], one["templateId"])]
    output.table(
        [
            ("TEMPLATE", lambda item: item.get("template")),
            ("CLASS", lambda item: item.get("class")),
            ("SIZE", lambda item: _shown(item["size"])),
            ("READY", lambda item: f"{item['ready']} of {item['count']}"),
            ("STARTING", lambda item: item.get("starting")),
            ("PROBLEM", lambda item: item.get("problem")),
        ],
        found,
        empty="Nothing is kept warm. `atoll template warm NAME --count N` begins to.",
        as_json=as_json,
    )


def _shown(size: dict[str, int]) -> str:
    return f"{size['cpuMillis'] / 1000:g} cores, {size['memoryMib']} MiB, {size['diskMib']} MiB disk"
