"""`atoll control`: the process that decides, and how other machines reach it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli import output
from atoll.cli.output import JsonOption
from atoll.programs.layout import layout_of

app = typer.Typer(
    no_args_is_help=False, invoke_without_command=True, rich_markup_mode=None, help="Control: how hosts of other machines reach it."
)


@app.callback()
def control(
    context: typer.Context,
    listen: Annotated[str | None, typer.Option(help="host:port of this replica; by default the instance's own, on loopback.")] = None,
    address: Annotated[str | None, typer.Option(help="URL by which other replicas reach it; by default where it listens.")] = None,
) -> None:
    """Control: how hosts of other machines reach it. Without a command: run it in the foreground, as the supervisor does; with PostgreSQL
    any number of them, each with a port of its own.
    """
    if context.invoked_subcommand is None:
        import os

        from atoll.programs import control_main

        for name, value in ((control_main.LISTEN_VARIABLE, listen), (control_main.ADDRESS_VARIABLE, address)):
            if value is not None:
                os.environ[name] = value
        control_main.main()


@app.command("listen")
def listen(  # noqa: PLR0913, PLR0917 - what one may say of a listener is this much
    address: Annotated[str, typer.Argument(help="HOST:PORT, or :PORT for every address of this machine.")] = ":3443",
    name: Annotated[
        list[str] | None, typer.Option("--name", help="Name or address by which hosts reach this machine; may be repeated. Else its own.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option("--certificate", help="Yours, in PEM, with its chain; else one is made.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="Its key, readable by the user atoll.")] = None,
    ca: Annotated[Path | None, typer.Option("--ca", help="Who signed yours, where machines do not know it.")] = None,
    url: Annotated[list[str] | None, typer.Option("--url", help="Where agents dial, every replica; else https://NAME:PORT.")] = None,
    region: Annotated[str, typer.Option("--region", help="Of hosts that name none.")] = "local",
    auto_activate: Annotated[
        bool, typer.Option("--auto-activate/--no-auto-activate", help="Let hosts take sandboxes once enrolled.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Let hosts and clients of other machines reach control, over TLS (root). It is in force after `atoll up` starts control anew."""
    from atoll.programs import listening

    done = listening.listen(
        layout_of(),
        listening.Wanted(address, tuple(name or ()), certificate, key, ca, tuple(url or ()), region, auto_activate),
    )
    if as_json:
        output.document(done)
        return
    print(f"control answers on {done['listen']}, for {', '.join(done['urls'])}")
    if done["pin"]:
        print(f"its authority is {done['pin']}")
    typer.echo("Now: `atoll up`, which starts control anew, and `atoll host enrollment-token create NAME` for each host.", err=True)


@app.command("close")
def close(as_json: JsonOption = False) -> None:
    """Let nobody but this machine reach control (root). It is in force after `atoll up` starts control anew."""
    from atoll.programs import listening

    listening.close(layout_of())
    if as_json:
        output.document({"listen": None})
    else:
        print("control answers on this machine only, after `atoll up` has started it anew")
