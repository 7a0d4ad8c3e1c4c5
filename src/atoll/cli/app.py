"""The tree of commands. `programs.main` adds those that start and stop things."""

from __future__ import annotations

import os
import sys
from typing import Any, Final

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from atoll.base.errors import AtollError, Code
from atoll.cli import config, host, key, output, records, sandbox, snapshot, template, top


class Root(TyperGroup):
    """Turns Atoll's errors into messages and exit codes, for every command below."""

    ASKED_KEY: Final = "atoll.json.asked"

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        # Parsing empties the list.
        as_json = _asks_json(args)
        try:
            ctx = super().make_context(info_name, args, parent, **extra)
        except TyperException as error:
            if not as_json:
                raise
            raise _told(error) from error
        ctx.meta[self.ASKED_KEY] = as_json
        return ctx

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TyperException as error:
            if not ctx.meta.get(output.JSON_KEY, ctx.meta[self.ASKED_KEY]):
                raise
            raise _told(error) from error
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


def _asks_json(args: list[str]) -> bool:
    """Whether a line that could not be read asks for a document: what follows `--` is somebody else's."""
    ours = args[: args.index("--")] if "--" in args else args
    return "--json" in ours


def _told(error: TyperException) -> typer.Exit:
    """Say what is wrong with the command line in a document, where typer would say it in text."""
    context = getattr(error, "ctx", None)
    command = "atoll" if context is None else context.command_path
    told = AtollError(Code.INVALID_REQUEST, error.format_message(), hint=f"`{command} -h` shows what it takes.")
    output.show_error(told, as_json=True)
    return typer.Exit(error.exit_code)


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
    app.add_typer(snapshot.app, name="snapshot")
    app.add_typer(template.app, name="template")
    app.add_typer(host.app, name="host")
    app.add_typer(key.app, name="key")
    app.add_typer(config.app, name="config")
    app.add_typer(records.alerts, name="alert")
    app.command("audit")(records.audit)
    app.command("events")(records.events)
    app.command("top")(top.top)
    return app
