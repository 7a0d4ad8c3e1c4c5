"""`atoll host`: what holds sandboxes, for operators."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from atoll.base.errors import Code, Unavailable
from atoll.cli import arguments, completion, enrollment, output
from atoll.cli.output import JsonOption
from atoll.cli.session import session

if TYPE_CHECKING:
    from atoll.client.api import Api

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What holds sandboxes (operators).")

app.add_typer(enrollment.app, name="enrollment-token")

WAIT_LOOK_S: Final = 0.5

WaitOption = Annotated[bool, typer.Option("--wait", help="Return when nothing is on it any more.")]
TimeoutOption = Annotated[str, typer.Option(help="With --wait: give up after this: 90s, 5m, 2h.")]
HostArgument = Annotated[str, typer.Argument(help="Id or name.", autocompletion=completion.hosts)]


@app.command("list")
def list_hosts(as_json: JsonOption = False) -> None:
    """List the hosts with their health and what is used of them."""
    with session() as api:
        found = api.hosts()
    output.table(
        [
            ("NAME", lambda item: item.get("name")),
            ("ID", lambda item: item.get("id")),
            ("STATE", lambda item: item.get("admin")),
            ("HEALTH", lambda item: item.get("health")),
            ("ISOLATION", lambda item: item.get("isolations")),
            ("SANDBOXES", lambda item: item.get("sandboxes")),
            ("WARM", lambda item: item.get("warm")),
            ("CPU", lambda item: _share(item, "cpuMillis", 1000, "cores")),
            ("MEMORY", lambda item: _share(item, "memoryMib", 1024, "GiB")),
            ("PROBLEMS", lambda item: item.get("problems")),
        ],
        found,
        empty="No hosts. The agent of this machine enrols itself at `atoll up`.",
        as_json=as_json,
    )


@app.command("get")
def get_host(
    host: HostArgument,
    as_json: JsonOption = False,
) -> None:
    """Show one host."""
    with session() as api:
        found = api.host(host)
    if as_json:
        output.document(found)
        return
    output.fields(
        [
            ("name", found.get("name")),
            ("id", found.get("id")),
            ("admin state", found.get("admin")),
            ("health", found.get("health")),
            ("isolation", found.get("isolations")),
            ("goes on from", found.get("goesOnFrom")),
            ("problems", [f"{one['id']} ({one['detail']})" if one["detail"] else one["id"] for one in found.get("conditions") or []]),
            ("sandboxes", found.get("sandboxes")),
            ("capacity", found.get("capacity")),
            ("used", found.get("used")),
            ("registered", (found.get("registered") or {}).get("inventory")),
            ("reserve", (found.get("registered") or {}).get("reserve")),
            ("overcommit", (found.get("registered") or {}).get("overcommit")),
            ("reported", found.get("reported")),
            ("slots in", (found.get("registered") or {}).get("slots")),
            ("architecture", found.get("arch")),
            ("region", found.get("region")),
            ("labels", found.get("labels")),
            ("lease until", output.moment(found.get("leaseUntil"))),
            ("agent version", found.get("agentVersion")),
            ("seen", output.moment(found.get("seenAt"))),
            ("facts", found.get("facts")),
        ]
    )


@app.command("why")
def why(  # noqa: PLR0913, PLR0917 - what one may ask of a sandbox is this much
    host: Annotated[str | None, typer.Argument(help="Only this one, by id or name.", autocompletion=completion.hosts)] = None,
    sandbox: Annotated[str | None, typer.Option("--sandbox", help="For this sandbox, instead of one like this:")] = None,
    template: Annotated[str | None, typer.Option("--template", "-t", help="Name or id.")] = None,
    class_name: Annotated[str | None, typer.Option("--class", help="Operator's class.")] = None,
    cpu: Annotated[str | None, typer.Option(help="Cores (2, 0.5) or millicores (250m).")] = None,
    memory: Annotated[str | None, typer.Option(help="512M, 2G.")] = None,
    disk: Annotated[str | None, typer.Option(help="2G.")] = None,
    require_host: Annotated[str | None, typer.Option("--require-host", help="As if it had to be this one.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Show at most this many hosts.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Say where a sandbox would be placed now and what speaks against each host. Nothing is made."""
    from atoll.cli import arguments, whys

    size = {
        **({"cpuMillis": arguments.cpu_millis(cpu)} if cpu is not None else {}),
        **({"memoryMib": arguments.size_mib(memory)} if memory is not None else {}),
        **({"diskMib": arguments.size_mib(disk)} if disk is not None else {}),
    }
    asked = {"template": template, "class": class_name, "size": size, "requireHost": require_host}
    with session() as api:
        if sandbox is not None:
            told = api.why(sandbox, limit=limit)
        else:
            told = api.why_request({name: value for name, value in asked.items() if value}, limit=limit)
    if as_json:
        output.document(told)
    else:
        whys.show(told, host=host)


@app.command("activate")
def activate_host(host: HostArgument, as_json: JsonOption = False) -> None:
    """Let a host take new sandboxes."""
    _set_admin(host, "activate", as_json=as_json)


@app.command("drain")
def drain_host(host: HostArgument, wait: WaitOption = False, timeout: TimeoutOption = "30m", as_json: JsonOption = False) -> None:
    """Give a host no new sandboxes; those that it has go on."""
    _set_admin(host, "drain", wait_s=arguments.duration_s(timeout) if wait else None, as_json=as_json)


@app.command("disable")
def disable_host(
    host: HostArgument,
    off: Annotated[bool, typer.Option("--off", help="The machine is known to be off: count its sandboxes as gone at once.")] = False,
    wait: WaitOption = False,
    timeout: TimeoutOption = "30m",
    as_json: JsonOption = False,
) -> None:
    """Fence a host: its credential ends, its sandboxes end, and it must be reset and enrolled again."""
    _set_admin(host, "disable", off=off, wait_s=arguments.duration_s(timeout) if wait else None, as_json=as_json)


@app.command("reset")
def reset_host(host: HostArgument, as_json: JsonOption = False) -> None:
    """Let a disabled machine enrol anew, once nothing of it counts as being there."""
    _set_admin(host, "reset", as_json=as_json)


@app.command("recount")
def recount_host(host: HostArgument, as_json: JsonOption = False) -> None:
    """Let a host grant what its machine has now, after memory, cores or disks were changed."""
    with session() as api:
        changed = api.recount_host(host)
    if as_json:
        output.document(changed)
        return
    print(f"{changed['name']} grants {', '.join(f'{name}={amount}' for name, amount in changed['capacity'].items())}")


def _set_admin(host: str, verb: str, *, as_json: bool, off: bool = False, wait_s: int | None = None) -> None:
    with session() as api:
        changed = api.set_host_admin(host, verb, off=off)
        if wait_s is not None:
            changed = _until_empty(api, changed, wait_s)
    if as_json:
        output.document(changed)
        return
    print(f"{changed['name']} is {changed['admin']}, {changed['sandboxes']} sandboxes on it")


def _until_empty(api: Api, host: dict[str, Any], patience_s: int) -> dict[str, Any]:
    """The host once nothing is on it. *Errors*: Unavailable HOST_NOT_EMPTY; another operator's word ends the wait, too."""
    deadline, wanted = time.monotonic() + patience_s, host["admin"]
    while host["sandboxes"] and host["admin"] == wanted:
        if time.monotonic() > deadline:
            raise Unavailable(Code.HOST_NOT_EMPTY, f"{host['name']} still holds {host['sandboxes']} sandbox(es)")
        time.sleep(WAIT_LOOK_S)
        host = api.host(host["id"])
    return host


def _share(item: dict[str, Any], name: str, divisor: int, unit: str) -> str | None:
    capacity, used = (item.get("capacity") or {}).get(name), (item.get("used") or {}).get(name)
    return None if capacity is None else f"{(used or 0) / divisor:.1f} of {capacity / divisor:.1f} {unit}"
