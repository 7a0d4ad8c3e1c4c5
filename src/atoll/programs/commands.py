"""The commands that start, stop and look at an instance. What they do is in modules of their own, imported when they are used."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from atoll.base.errors import AtollError, Code, Refused
from atoll.cli import output
from atoll.cli.output import JsonOption
from atoll.programs import agent_commands, control_commands, image_commands, registry_commands, shown
from atoll.programs.layout import layout_of


def add_to(app: typer.Typer) -> None:
    """Add them, those for people before those that only programs start."""
    for name, function in (("up", up), ("down", down), ("status", status), ("env", env), ("doctor", doctor)):
        app.command(name)(function)
    backup = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Control's database into a file, and back.")
    backup.command("create")(backup_create)
    backup.command("restore")(backup_restore)
    backup.command("restored")(backup_restored)
    app.add_typer(backup, name="backup")
    support = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What somebody who is to help needs to see.")
    support.command("bundle")(support_bundle)
    app.add_typer(support, name="support")
    app.add_typer(agent_commands.app, name="agent")
    app.add_typer(control_commands.app, name="control")
    app.add_typer(registry_commands.app, name="registry")
    app.add_typer(image_commands.app, name="image")
    app.command("supervise", hidden=True)(supervise)


def up(
    demo: Annotated[bool, typer.Option("--demo/--no-demo", help="Create a first sandbox and show what it says.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Start everything on this machine, detached, and run a first sandbox (root)."""
    from atoll.programs import up as program
    from atoll.programs.steps import Steps

    shown.quiet_logs()
    steps = Steps(quiet=as_json)
    try:
        outcome = program.up(layout_of(), steps, with_demo=demo)
    except (AtollError, OSError) as error:
        raise _at_step(error, steps.failed) from error
    if as_json:
        output.document(asdict(outcome))


def down(
    keep_sandboxes: Annotated[
        bool, typer.Option("--keep-sandboxes", help="Stop only the programs; sandboxes go on, unwatched, until the next `up`.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """End all sandboxes, stop everything, clean the machine (root). State stays in ATOLL_HOME."""
    from atoll.programs import down as program
    from atoll.programs.steps import Steps

    shown.quiet_logs()
    steps = Steps(quiet=as_json)
    try:
        outcome = program.down(layout_of(), steps, keep_sandboxes=keep_sandboxes)
    except (AtollError, OSError) as error:
        raise _at_step(error, steps.failed) from error
    if as_json:
        output.document(asdict(outcome))


def status(as_json: JsonOption = False) -> None:
    """Show what runs, where, and whether it is well. Status 4 when something is not."""
    from atoll.programs import status as program

    seen = program.collect(layout_of())
    if as_json:
        output.document(seen)
    else:
        output.table(
            [
                ("NAME", lambda item: item["name"]),
                ("PID", lambda item: item["pid"]),
                ("ADDRESS", lambda item: item["address"]),
                ("VERSION", lambda item: item["version"]),
                ("HEALTH", lambda item: "well" if item["healthy"] else "not well"),
                ("RESTARTS", lambda item: item["restarts"]),
                ("DETAIL", lambda item: item["detail"]),
            ],
            seen["processes"],
            empty="Nothing.",
        )
        print(f"\n{seen['install_id']} in {seen['home']}, API and sandboxes on {seen['url']}")
        if summary := program.summary(seen):
            print(summary)
        if replicas := program.replicas(seen):
            print()
            output.table(
                [
                    ("REPLICA", lambda item: item["id"]),
                    ("ADDRESS", lambda item: item["address"]),
                    ("MACHINE", lambda item: item["machine"]),
                    ("VERSION", lambda item: item["version"]),
                    ("HEALTH", lambda item: "well" if item["healthy"] else "silent"),
                    ("HEARD", lambda item: item["seenAt"]),
                ],
                replicas,
                empty="",
            )
    if not seen["healthy"]:
        raise typer.Exit(int(output.Exit.UNAVAILABLE))


def env(as_json: JsonOption = False) -> None:
    """Print the export lines that SDKs and `atoll` need: eval "$(atoll env)"."""
    from atoll.programs import export, instance

    place = layout_of()
    config = instance.load(place)
    try:
        values = export.variables(place, config)
    except OSError as error:
        raise Refused(
            Code.FORBIDDEN, f"the operator key in {place.operator_key} is not readable: {error.strerror}", hint="Run it as root."
        ) from error
    if as_json:
        output.document(values)
    else:
        print(export.lines(values))


def backup_create(
    file: Annotated[Path, typer.Argument(help="A new file; it gets mode 0600.")],
    as_json: JsonOption = False,
) -> None:
    """Back control's database up into FILE, while everything runs (root)."""
    from importlib.metadata import version

    from atoll.programs import backup as program

    made = program.create(layout_of(), file, version=version("atoll"))
    if as_json:
        output.document(asdict(made))
        return
    print(f"{made.file}: {made.size_bytes / 2**20:.1f} MiB, schema {made.schema}, incarnation {made.incarnation}, SHA-256 {made.sha256}")
    print("\nKeep with it, in another place: without these files it restores nothing, and they are not in it.")
    for name in made.keep_with_it:
        print(f"  {name}")


def backup_restore(
    file: Annotated[Path, typer.Argument(help="A file that `atoll backup create` made, of this instance.")],
    as_json: JsonOption = False,
) -> None:
    """Take control's database back to FILE (root). Sandboxes go on; hosts say what they have that the backup does not know."""
    from atoll.programs import backup as program

    taken = program.restore(layout_of(), file)
    if as_json:
        output.document(asdict(taken))
        return
    print(f"Control's database is that of {output.moment(taken.made_at)}; its incarnation is {taken.incarnation}.")
    print(f"What it was before is in {taken.replaced}, until the next restore.")
    print(
        "\nHosts now say what they have: sandboxes that the backup does not know get a record again, without metadata; those that no host\n"
        "has have ended (PLACEMENT_LOST). `atoll sandbox list` and `atoll host list` show it."
    )
    print("Keys that were revoked since the backup are valid again: revoke them. Hosts that were enrolled since must be enrolled again.")


def backup_restored(as_json: JsonOption = False) -> None:
    """Say that the PostgreSQL database was restored by its own tools, before any control process uses it."""
    from atoll.programs import backup as program

    incarnation = program.restored(layout_of())
    if as_json:
        output.document({"incarnation": incarnation})
    else:
        print(f"The store's incarnation is {incarnation}.")


def doctor(as_json: JsonOption = False) -> None:
    """Check this machine and this instance: each check with its result and fix. Status 1 when one fails."""
    from atoll.programs import doctor as program

    shown.quiet_logs()
    shown.show_report(program.examine(layout_of()), as_json=as_json)


def support_bundle(
    file: Annotated[Path, typer.Argument(help="A file that does not exist yet: NAME.tar.gz.", dir_okay=False)],
    as_json: JsonOption = False,
) -> None:
    """Pack versions, status, checks, hosts, events, alerts and the ends of the logs into one file, without any secret (root)."""
    from atoll.programs import support as program

    shown.quiet_logs()
    made = program.write(program.collect(layout_of()), file)
    if as_json:
        output.document(made)
        return
    print(f"{made['file']}: {len(made['parts'])} parts, {made['bytes'] // 1024} KiB")
    for name, reason in made["missing"].items():
        print(f"not in it: {name} ({reason})", file=sys.stderr)


def supervise(as_json: JsonOption = False) -> None:
    """Run the supervisor in the foreground; `up` starts it detached."""
    from atoll.programs import supervisor

    del as_json
    supervisor.main()


def _at_step(error: AtollError | OSError, step: str | None) -> AtollError:
    """The same error, saying at which step it came; one of this machine's (a full disk...) becomes SETUP_FAILED."""
    if isinstance(error, OSError):
        error = Refused(Code.SETUP_FAILED, str(error), hint="Mend what the message names (space, permissions) and run it again.")
    if step is not None:
        error.message = f"step `{step}` failed: {error.message}"
        sys.stdout.flush()
    return error
