"""The tree of commands. `programs.main` adds those that start and stop things."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from atoll.base.errors import AtollError, Code
from atoll.cli import config, host, key, output, sandbox, template


class Root(TyperGroup):
    """Turns Atoll's errors into messages and exit codes, for every command below."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AtollError as error:
            output.show_error(error, as_json=bool(ctx.meta.get(output.JSON_KEY)))
            raise typer.Exit(int(output.exit_code(error))) from error
        except BrokenPipeError as error:
            # Whoever reads our output has gone; nothing is left to say, not even at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from error
        except OSError as error:
            # Of this machine: a path of the user's that cannot be read or written.
            local = AtollError(Code.INVALID_REQUEST, str(error), hint="Look at the path and its permissions.")
            output.show_error(local, as_json=bool(ctx.meta.get(output.JSON_KEY)))
            raise typer.Exit(int(output.Exit.FAILED)) from error
        except KeyboardInterrupt as interruption:
            raise typer.Exit(130) from interruption


def build() -> typer.Typer:
    """The client's commands, ready for more."""
    app = typer.Typer(
        name="atoll",
        cls=Root,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Sandboxes on your own machines: isolated Linux guests that start in milliseconds and speak the E2B API.",
    )
    app.add_typer(sandbox.app, name="sandbox")
    app.add_typer(template.app, name="template")
    app.add_typer(host.app, name="host")
    app.add_typer(key.app, name="key")
    app.add_typer(config.app, name="config")
    return app
