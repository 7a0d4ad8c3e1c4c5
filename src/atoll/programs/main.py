"""The command `atoll`: the client's commands and those of this machine's instance."""

from __future__ import annotations

import typer

from atoll.cli.app import build
from atoll.programs import commands


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"atoll {version('atoll')}")
        raise typer.Exit


app = build()
commands.add_to(app)


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and end.", callback=_show_version, is_eager=True),
) -> None:
    del version


def main() -> None:
    """Entry point."""
    app(prog_name="atoll")


if __name__ == "__main__":
    main()
