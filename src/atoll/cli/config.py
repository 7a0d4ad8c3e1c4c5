"""`atoll config`: the deployment document, for operators."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.base.errors import AtollError, Code, Refused
from atoll.cli import output
from atoll.cli.output import JsonOption
from atoll.cli.session import session

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The deployment document: classes and limits (operators).")

FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="The document; - reads standard input.")]


@app.command("show")
def show(
    revision: Annotated[int | None, typer.Option("--revision", "-r", min=0, help="An earlier one; 0 is the built-in one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the document that applies; it can be changed and applied again."""
    with session() as api:
        found = api.config(revision)
    if as_json:
        output.document(found)
        return
    sys.stdout.write(output.printable(found["document"]))
    applied = f"applied {output.moment(found['appliedAt'])} by {found['appliedBy']}" if found.get("appliedAt") else "built in"
    typer.echo(f"revision {found['revision']}, {applied}", err=True)


@app.command("history")
def history(
    limit: Annotated[int, typer.Option(min=1, max=100, help="At most this many.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List the documents that were applied, newest first."""
    with session() as api:
        found = api.config_history(limit=limit)
    output.table(
        [
            ("REVISION", lambda item: item.get("revision")),
            ("APPLIED", lambda item: output.moment(item.get("appliedAt"))),
            ("BY", lambda item: item.get("appliedBy")),
            ("LINES", lambda item: str(item.get("document", "")).count("\n")),
        ],
        found,
        empty="No document was applied; what Atoll brings itself applies (`atoll config show`).",
        as_json=as_json,
    )


@app.command("check")
def check(file: FileArgument, as_json: JsonOption = False) -> None:
    """Say what is wrong with a document. Nothing is applied, and nothing needs to run."""
    problems = _problems(_read(file))
    if as_json:
        output.document({"valid": not problems, "problems": problems})
    else:
        _say(file, problems)
    if problems:
        raise typer.Exit(int(output.Exit.USAGE))


@app.command("apply")
def apply(
    file: FileArgument,
    revision: Annotated[
        int | None, typer.Option("--revision", "-r", min=0, help="Only in the place of this one; otherwise of the one that applies now.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a document changes and let it apply. Sandboxes that there are keep what they were made with."""
    text = _read(file)
    with session() as api:
        checked = api.check_config(text)
        if not checked["valid"]:
            if as_json:
                output.document({"applied": False, **checked})
            else:
                _say(file, checked["problems"])
            raise typer.Exit(int(output.Exit.USAGE))
        present = api.config()
        replaced = present["revision"] if revision is None else revision
        if not as_json:
            _show_changes(checked["changes"], present, text)
        if dry_run or (present["document"] == text and replaced == present["revision"]):
            if as_json:
                output.document({"applied": False, **checked})
            return
        if (
            not as_json
            and not yes
            and sys.stdin.isatty()
            and file != "-"
            and not typer.confirm(f"Apply in the place of revision {replaced}?")
        ):
            raise typer.Exit(int(output.Exit.FAILED))
        # What was shown is what is applied: a document that came in between makes this a conflict.
        applied = api.apply_config(text, revision=replaced)
    if as_json:
        output.document({"applied": True, **applied, "changes": checked["changes"]})
    else:
        typer.echo(f"revision {applied['revision']} applies", err=True)


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(Code.CONFIG_INVALID, f"{file} is not UTF-8 text: byte {error.start}") from error


def _problems(text: str) -> list[dict[str, Any]]:
    from atoll.wire import deployment
    from atoll.wire.document import NotADocument

    try:
        deployment.read(text)
    except NotADocument as refused:
        return [
            {"line": one.line or None, "column": one.column or None, "path": one.path, "message": one.message, "hint": one.hint}
            for one in refused.problems
        ]
    return []


def _say(file: str, problems: list[dict[str, Any]]) -> None:
    if not problems:
        print(f"{file}: no problem was found")
        return
    for one in problems:
        place = f"{file}:{one['line']}:{one['column']}" if one.get("line") else file
        what = f"{one['path']}: {one['message']}" if one.get("path") else one["message"]
        print(output.printable(f"{place}: {what}" + (f" ({one['hint']})" if one.get("hint") else "")), file=sys.stderr)
    count = len(problems)
    error = AtollError(Code.CONFIG_INVALID, f"{count} problem{'s' if count != 1 else ''} in {file}")
    output.show_error(error, as_json=False)


def _show_changes(changes: list[dict[str, Any]], present: dict[str, Any], text: str) -> None:
    for one in changes:
        before, after = one["before"], one["after"]
        if before is None:
            line = f"+ {one['path']}: {after}"
        elif after is None:
            line = f"- {one['path']}: {before}"
        else:
            line = f"~ {one['path']}: {before} -> {after}"
        print(output.printable(line))
    if changes:
        return
    if present["document"] == text:
        print(f"nothing changes: this is revision {present['revision']}")
        return
    print("nothing changes but the text:")
    lines = difflib.unified_diff(present["document"].splitlines(), text.splitlines(), "applies", "new", lineterm="")
    print(output.printable("\n".join(lines)))
