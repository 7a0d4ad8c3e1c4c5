"""`atoll sandbox`: make, see, use and end sandboxes."""

from __future__ import annotations

import json
import secrets
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.base.errors import AtollError, Code, OutcomeUnknown, Refused, Unavailable
from atoll.cli import arguments, completion, output, snapshot
from atoll.cli.output import JsonOption
from atoll.cli.session import session

if TYPE_CHECKING:
    from atoll.client.api import Api

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make, see, use and end sandboxes.")

SandboxArgument = Annotated[str, typer.Argument(metavar="SANDBOX", help="Id of the sandbox.", autocompletion=completion.sandboxes)]
UserOption = Annotated[str | None, typer.Option("--user", "-u", help="User inside; otherwise the template's.")]
ENDED = frozenset({"released", "failed"})
RESTING = frozenset({"paused", "suspended", "stopped"})
ASK_AGAIN_S = 20.0


@app.command("create")
def create(  # noqa: PLR0913, PLR0917 - a command has as many options as it needs
    template: Annotated[
        str | None,
        typer.Option("--template", "-t", help="Name or id; otherwise the class's, else base.", autocompletion=completion.templates),
    ] = None,
    timeout: Annotated[str | None, typer.Option(help="It ends by itself after this: 90s, 5m, 2h; otherwise the class's.")] = None,
    cpu: Annotated[str | None, typer.Option(help="Cores (2, 0.5) or millicores (250m); otherwise the template's.")] = None,
    memory: Annotated[str | None, typer.Option(help="512M, 2G; otherwise the template's.")] = None,
    disk: Annotated[str | None, typer.Option(help="2G; otherwise the template's. Fixed at creation.")] = None,
    class_name: Annotated[str | None, typer.Option("--class", help="Operator's class; `atoll config show` has them.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE for every process inside.")] = None,
    metadata: Annotated[list[str] | None, typer.Option("--metadata", "-m", help="NAME=VALUE to find it by.")] = None,
    no_internet: Annotated[bool, typer.Option("--no-internet", help="No way out of the sandbox.")] = False,
    prefer_host: Annotated[str | None, typer.Option(help="Ask this host first, where caches of earlier work are.")] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Answer when it is accepted, not when it is ready.")] = False,
    request_id: Annotated[str | None, typer.Option(help="Repeating a create with the same id gives the same sandbox.")] = None,
    shell: Annotated[bool, typer.Option("--shell", help="Open a terminal in it at once.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Create a sandbox and print its id."""
    size: dict[str, int] = {}
    if cpu is not None:
        size["cpuMillis"] = arguments.cpu_millis(cpu)
    if memory is not None:
        size["memoryMib"] = arguments.size_mib(memory)
    if disk is not None:
        size["diskMib"] = arguments.size_mib(disk)
    if shell and no_wait:
        raise typer.BadParameter("--shell needs a sandbox that is ready; leave --no-wait out")
    with session() as api:
        made = _created(
            api,
            request_id=request_id or f"cli-{secrets.token_hex(12)}",
            template=template,
            timeout_s=arguments.duration_s(timeout) if timeout is not None else None,
            class_name=class_name,
            size=size,
            metadata=arguments.pairs(metadata, what="metadata"),
            env=arguments.pairs(env, what="environment variable"),
            internet=False if no_internet else None,
            prefer_host=prefer_host,
            wait=not no_wait,
        )
        if as_json:
            output.document(made)
        else:
            print(made["id"], flush=True)
        if shell:
            _open_shell(api, made, user=None, cwd=None, command=[])


def _created(api: Api, **wanted: Any) -> dict[str, Any]:
    """Create, and ask again where no answer came: the request id makes both the same sandbox."""
    deadline = time.monotonic() + ASK_AGAIN_S
    while True:
        try:
            return api.create_sandbox(**wanted)
        except OutcomeUnknown:
            if time.monotonic() > deadline:
                raise
        except (Refused, Unavailable) as error:
            # Control is being started again, or the first request is still on its way. Nobody there at all is another matter.
            passing = error.code is Code.REQUEST_IN_PROGRESS or (error.code is Code.CONTROL_UNAVAILABLE and "status" in error.detail)
            if not passing or time.monotonic() > deadline:
                raise
        time.sleep(0.3)


@app.command("list")
def list_sandboxes(
    state: Annotated[
        list[str] | None,
        typer.Option("--state", "-s", help="Only in this state (ready, paused...); may be repeated.", autocompletion=completion.states),
    ] = None,
    ended: Annotated[bool, typer.Option("--all", "-a", help="Ended ones too.")] = False,
    metadata: Annotated[list[str] | None, typer.Option("--metadata", "-m", help="Only with this NAME=VALUE.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many.")] = None,
    all_teams: Annotated[bool, typer.Option("--all-teams", help="Every team's (operators).")] = False,
    team: Annotated[str | None, typer.Option(help="Another team's, by name or id (operators).")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only ids, one a line.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the team's sandboxes, newest first."""
    if all_teams and team:
        raise typer.BadParameter("--all-teams or --team, not both")
    with session() as api:
        found = api.sandboxes(
            states=state,
            ended=ended,
            metadata=arguments.pairs(metadata, what="metadata"),
            limit=limit,
            team="*" if all_teams else team,
        )
    if as_json:
        output.document({"items": found})
        return
    if quiet:
        for item in found:
            print(item["id"])
        return
    output.table(
        [
            ("ID", lambda item: item.get("id")),
            *([("TEAM", lambda item: item.get("teamId"))] if all_teams else []),
            ("STATE", lambda item: item.get("state")),
            ("TEMPLATE", lambda item: (item.get("template") or {}).get("name")),
            ("CPU", lambda item: _of_size(item, "cpuMillis", 1000, "")),
            ("MEMORY", lambda item: _of_size(item, "memoryMib", 1, " MiB")),
            ("AGE", lambda item: output.age(item.get("createdAt"))),
            ("ENDS", lambda item: output.age(item.get("endAt")) if item.get("state") not in ENDED else item.get("reason")),
            ("CONDITIONS", lambda item: item.get("conditions")),
            ("METADATA", lambda item: item.get("metadata")),
        ],
        found,
        empty="No sandboxes.",
    )


@app.command("get")
def get(sandbox: SandboxArgument, as_json: JsonOption = False) -> None:
    """Show one sandbox, in whatever state it is."""
    with session() as api:
        found = api.sandbox(sandbox)
    if as_json:
        output.document(found)
        return
    output.fields(
        [
            ("id", found.get("id")),
            ("state", found.get("state")),
            ("reason", found.get("reason")),
            ("detail", found.get("detail")),
            ("conditions", found.get("conditions")),
            ("template", (found.get("template") or {}).get("name")),
            ("class", found.get("class")),
            ("isolation", found.get("isolation")),
            ("driver", (found.get("machine") or {}).get("driver")),
            ("hardware", (found.get("machine") or {}).get("hardware")),
            ("suspend keeps", (found.get("machine") or {}).get("saves")),
            ("size", found.get("size")),
            ("host", (found.get("placement") or {}).get("hostId")),
            ("saved", _where_saved(found)),
            ("generation", found.get("generation")),
            ("created", output.moment(found.get("createdAt"))),
            ("ready", output.moment(found.get("startedAt"))),
            ("ends", output.moment(found.get("endAt"))),
            ("released", output.moment(found.get("releasedAt"))),
            ("metadata", found.get("metadata")),
        ]
    )


def _where_saved(found: dict[str, Any]) -> str | None:
    """Where what is saved of it is, for people; None: nothing is."""
    if found.get("state") != "suspended":
        return None
    mode, stored = found.get("saveMode") or "full", found.get("stored")
    if stored is None:
        return f"{mode}, on its host alone"
    size = f"{stored['bytes'] / (1 << 20):.1f} MiB"
    where = "with a copy on its host" if found.get("placement") else "on no host"
    return f"{mode}, in the artifact store ({size}), {where}"


@app.command("exec", context_settings={"allow_interspersed_args": False})
def execute(
    sandbox: SandboxArgument,
    command: Annotated[list[str], typer.Argument(help="Program and arguments, as they are: no shell reads them.")],
    user: UserOption = None,
    cwd: Annotated[str | None, typer.Option("--cwd", "-w", help="Directory inside.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE for this command.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Give it this command's standard input.")] = False,
    timeout: Annotated[str | None, typer.Option(help="Kill it after this: 90s, 5m.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a command in a sandbox and exit with its status (127: it cannot be started). Options come before SANDBOX."""
    from atoll.cli import execution

    command = arguments.after_dashes(command)
    with session() as api, api.guest(_running(api, sandbox)) as guest:
        code = execution.run(
            guest,
            command,
            execution.Options(
                user=user,
                cwd=cwd,
                env=arguments.pairs(env, what="environment variable"),
                stdin=stdin,
                timeout_s=arguments.duration_s(timeout) if timeout else None,
                as_json=as_json,
            ),
        )
    raise typer.Exit(code)


@app.command("shell", context_settings={"allow_interspersed_args": False})
def shell(
    sandbox: SandboxArgument,
    command: Annotated[list[str] | None, typer.Argument(help="Instead of a login shell.")] = None,
    user: UserOption = None,
    cwd: Annotated[str | None, typer.Option("--cwd", "-w", help="Directory inside.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Open a terminal in a sandbox; exit with the shell's status. Options come before SANDBOX."""
    with session() as api:
        code = _open_shell(api, _running(api, sandbox), user=user, cwd=cwd, command=arguments.after_dashes(command or []))
    if as_json:
        output.document({"sandbox": sandbox, "exitCode": code})
    raise typer.Exit(code)


@app.command("cp")
def copy(
    source: Annotated[str, typer.Argument(help="A local path, or SANDBOX:PATH.")],
    target: Annotated[str, typer.Argument(help="The other one. A directory, or a path ending in /, takes the source's name.")],
    user: UserOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy files or directories into a sandbox or out of it."""
    from atoll.cli import copying

    source_sandbox, source_path = arguments.place(source)
    target_sandbox, target_path = arguments.place(target)
    if (source_sandbox is None) == (target_sandbox is None):
        raise typer.BadParameter("exactly one of SOURCE and TARGET must be SANDBOX:PATH")
    with session() as api, api.guest(_running(api, str(source_sandbox or target_sandbox))) as guest:
        started = time.monotonic()
        if target_sandbox is not None:
            copied = copying.upload(guest, source_path, target_path, user=user, quiet=as_json)
        else:
            copied = copying.download(guest, source_path, target_path, user=user, quiet=as_json)
    elapsed_s = time.monotonic() - started
    if as_json:
        output.document({"source": source, "target": copied.target, "bytes": copied.size_bytes, "elapsedMs": round(elapsed_s * 1000)})
        return
    typer.echo(f"{copied.size_bytes} bytes to {copied.target} in {elapsed_s:.2f} s", err=True)


@app.command("logs")
def logs(sandbox: SandboxArgument, as_json: JsonOption = False) -> None:
    """Print the guest's console, as far as its host still has it."""
    with session() as api:
        text = api.logs(sandbox)
    if as_json:
        output.document({"sandbox": sandbox, "logs": text})
        return
    sys.stdout.write(text if not text or text.endswith("\n") else text + "\n")


@app.command("events")
def events(
    sandbox: SandboxArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it has ended.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print a sandbox's history. With --follow and --json, one document a line."""
    with session() as api:
        seen = _all_events(api, sandbox, after=0)
        if not follow:
            output.table(
                [
                    ("AT", lambda item: output.moment(item.get("at"))),
                    ("EVENT", lambda item: item.get("type")),
                    ("STATE", lambda item: item.get("state")),
                    ("GENERATION", lambda item: item.get("generation")),
                    ("REASON", lambda item: item.get("reason")),
                    ("DATA", lambda item: item.get("data")),
                ],
                seen,
                empty="No events.",
                as_json=as_json,
            )
            return
        _follow(api, sandbox, seen, as_json=as_json)


def _all_events(api: Api, sandbox: str, *, after: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while page := api.events(sandbox, after=after):
        found += page
        after = int(page[-1]["seq"])
    return found


def _follow(api: Api, sandbox: str, seen: list[dict[str, Any]], *, as_json: bool) -> None:
    after = 0
    while True:
        for item in seen:
            after = int(item["seq"])
            if _show_event(item, as_json=as_json):
                return
        try:
            for item in api.follow_events(sandbox, after=after):
                after = int(item["seq"])
                if _show_event(item, as_json=as_json):
                    return
        except AtollError as error:
            # Control is being started again: nothing is missed, since we say where we were.
            if error.code is not Code.CONTROL_UNAVAILABLE:
                raise
        time.sleep(0.5)
        seen = _all_events(api, sandbox, after=after)


@app.command("authorize-replacement")
def authorize_replacement(
    sandbox: SandboxArgument,
    generation: Annotated[int | None, typer.Option(min=1, help="The lost one; otherwise the present one.")] = None,
    statement: Annotated[str, typer.Option(help="What was revoked; recorded in the sandbox's history.")] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Certify that what a lost guest was given is revoked outside, so that a new one may begin (REPLACEMENT_BLOCKED)."""
    with session() as api:
        meant = generation
        if meant is None:
            found = api.sandbox(sandbox)
            # One that holds nothing any more is counted as the next generation already.
            meant = int(found["generation"]) - (1 if found["state"] == "pending" else 0)
        if not yes and not as_json and sys.stdin.isatty():
            typer.confirm(f"Is everything revoked that generation {meant} of {sandbox} was given?", abort=True)
        done = api.authorize_replacement(sandbox, generation=max(1, meant), statement=statement)
    if as_json:
        output.document(done)
    else:
        print(f"{done['id']} is {done['state']}, generation {done['generation']}")


app.command("snapshot")(snapshot.take)
app.command("fork")(snapshot.fork)


@app.command("pause")
def pause(sandbox: SandboxArgument, as_json: JsonOption = False) -> None:
    """Freeze a sandbox where it is: it keeps memory, disk and connections, uses no CPU, and does not end."""
    with session() as api:
        _show_rest(api.pause(sandbox), as_json=as_json)


@app.command("suspend")
def suspend(
    sandbox: SandboxArgument,
    files_only: Annotated[bool, typer.Option("--files-only", help="Save files alone; it boots anew when it is resumed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Save a sandbox and let its host have its memory back. Says what was saved: not every driver can save memory."""
    with session() as api:
        _show_rest(api.suspend(sandbox, memory=not files_only), as_json=as_json)


@app.command("resume")
def resume(
    sandbox: SandboxArgument,
    timeout: Annotated[str | None, typer.Option(help="It lives this long from then on: 90s, 5m, 2h; otherwise as it was created.")] = None,
    reboot: Annotated[bool, typer.Option("--reboot", help="Begin from its files alone, though its memory is saved, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Let a sandbox go on that is paused, suspended or stopped."""
    with session() as api:
        life_s = arguments.duration_s(timeout) if timeout is not None else None
        _show_rest(api.resume(sandbox, timeout_s=life_s, reboot=reboot), as_json=as_json)


def _show_rest(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.document(found)
        return
    mode = f" ({found['saveMode']})" if found["state"] == "suspended" else ""
    print(f"{found['id']} is {found['state']}{mode}")


@app.command("why")
def why(
    sandbox: SandboxArgument,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Show at most this many hosts.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Say why a sandbox is where it is, or nowhere: what each filter of placing says of the hosts now."""
    from atoll.cli import whys

    with session() as api:
        told = api.why(sandbox, limit=limit)
    if as_json:
        output.document(told)
    else:
        whys.show(told)


def _show_event(item: dict[str, Any], *, as_json: bool) -> bool:
    """Print it; whether it is the last one that there can be."""
    if as_json:
        print(json.dumps(item, ensure_ascii=False), flush=True)
    else:
        print(f"{output.moment(item.get('at'))}  {item.get('type')}  {item.get('reason') or ''}".rstrip(), flush=True)
    return item.get("state") in ENDED


@app.command("rm")
def remove(
    sandboxes: Annotated[list[str] | None, typer.Argument(metavar="SANDBOX...", help="Ids.", autocompletion=completion.sandboxes)] = None,
    every: Annotated[bool, typer.Option("--all", help="Every sandbox of the team.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when they are seen gone from their host.")] = False,
    as_json: JsonOption = False,
) -> None:
    """End sandboxes, in whatever state they are."""
    if bool(sandboxes) == every:
        raise typer.BadParameter("name sandboxes, or --all for every one")
    done: list[dict[str, Any]] = []
    worst: AtollError | None = None
    with session() as api:
        ids = [str(item["id"]) for item in api.sandboxes()] if every else list(sandboxes or [])
        for sandbox_id in ids:
            try:
                api.release(sandbox_id)
                done.append({"id": sandbox_id, "released": True})
            except AtollError as error:
                if every and error.code is Code.SANDBOX_NOT_FOUND:
                    continue  # it ended by itself in between
                worst = error
                done.append({"id": sandbox_id, "released": False, "error": output.error_of(error)})
        if wait:
            _wait_gone(api, [item["id"] for item in done if item["released"]])
    output.show_items(done, lambda item: str(item["id"]), as_json=as_json)
    if worst is not None:
        raise typer.Exit(int(output.exit_code(worst)))


def _wait_gone(api: Api, ids: list[str], *, patience_s: float = 120.0) -> None:
    deadline = time.monotonic() + patience_s
    for sandbox_id in ids:
        while api.sandbox(sandbox_id).get("state") not in ENDED:
            if time.monotonic() > deadline:
                raise Unavailable(
                    Code.CLEANUP_FAILED, f"{sandbox_id} is still not gone", hint=f"`atoll sandbox events {sandbox_id}` says why."
                )
            time.sleep(0.05)


def _running(api: Api, sandbox_id: str) -> dict[str, Any]:
    found = api.sandbox(sandbox_id)
    state = str(found.get("state"))
    if state in ENDED or state == "releasing":
        raise Refused(Code.SANDBOX_NOT_FOUND, f"sandbox {sandbox_id} has ended ({found.get('reason') or state})")
    if state != "ready":
        hint = f"`atoll sandbox resume {sandbox_id}` lets it go on." if state in RESTING else None
        raise Refused(Code.ILLEGAL_STATE, f"sandbox {sandbox_id} is {state}, not ready", hint=hint)
    return found


def _open_shell(api: Api, found: dict[str, Any], *, user: str | None, cwd: str | None, command: list[str]) -> int:
    from atoll.cli import terminal

    with api.guest(found) as guest:
        return terminal.run(guest, command or ["/bin/bash", "-i", "-l"], user=user, cwd=cwd)


def _of_size(item: dict[str, Any], name: str, divisor: int, unit: str) -> str | None:
    amount = (item.get("size") or {}).get(name)
    return None if amount is None else f"{amount / divisor:g}{unit}"
