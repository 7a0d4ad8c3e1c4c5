"""`atoll agent`: this machine as a host. What the commands do is in modules of their own, imported when they are used."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.base.errors import Code, Refused
from atoll.base.secret import Secret
from atoll.cli import arguments, output
from atoll.cli.output import JsonOption
from atoll.programs import shown
from atoll.programs.layout import Layout, layout_of

if TYPE_CHECKING:
    from atoll.programs.joining import Outcome, Wanted

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="This machine as a host of an Atoll that runs elsewhere.")

Url = Annotated[str, typer.Argument(help="Control's address: https://HOST:PORT.")]
Name = Annotated[str | None, typer.Option("--name", help="The host's name, for which the token was made; else this machine's.")]
Home = Annotated[Path | None, typer.Option("--home", help="Where its state is kept; else ATOLL_HOME.")]
Region = Annotated[str | None, typer.Option("--region", help="Where it is; else what control says.")]
Labels = Annotated[list[str] | None, typer.Option("--label", help="NAME=VALUE, for classes that ask for it; may be repeated.")]
Authority = Annotated[Path | None, typer.Option("--ca", help="Who signed control's certificate: a file in PEM.")]
Pin = Annotated[str | None, typer.Option("--ca-pin", help="Its fingerprint instead, sha256:HEX: it is fetched, compared and kept.")]
ReserveCpu = Annotated[str | None, typer.Option("--reserve-cpu", help="Keep back: cores (1, 0.5) or millicores (500m).")]
ReserveMemory = Annotated[str | None, typer.Option("--reserve-memory", help="Keep back: 512M, 2G.")]
ReserveDisk = Annotated[str | None, typer.Option("--reserve-disk", help="Keep back of what is free now: 20G.")]
OverCpu = Annotated[float, typer.Option("--overcommit-cpu", min=0.01, max=1000, help="How many times a core is promised.")]
OverMemory = Annotated[float, typer.Option("--overcommit-memory", min=0.01, max=1000, help="How many times memory is promised.")]
OverDisk = Annotated[
    float, typer.Option("--overcommit-disk", min=0.01, max=1000, help="How many times the disk is promised (sparse files).")
]
Slots = Annotated[int, typer.Option("--slots", min=1, max=65536, help="The most sandboxes at once.")]
Subnet = Annotated[int | None, typer.Option("--subnet", min=0, max=63, help="Addresses in 10.(64+N).0.0/16; else one that no host has.")]
KeyFile = Annotated[Path | None, typer.Option("--key-file", help="An operator's key; else ATOLL_API_KEY.")]


@app.command("join")
def join(  # noqa: PLR0913, PLR0917 - what one may say of a host is this much
    url: Url,
    token_file: Annotated[Path | None, typer.Option("--token-file", help="Where the token is; `-` is standard input.")] = None,
    token_env: Annotated[str | None, typer.Option("--token-env", help="Name of the variable that holds the token.")] = None,
    name: Name = None,
    home: Home = None,
    region: Region = None,
    label: Labels = None,
    ca: Authority = None,
    ca_pin: Pin = None,
    reserve_cpu: ReserveCpu = None,
    reserve_memory: ReserveMemory = None,
    reserve_disk: ReserveDisk = None,
    overcommit_cpu: OverCpu = 16.0,
    overcommit_memory: OverMemory = 1.0,
    overcommit_disk: OverDisk = 8.0,
    slots: Slots = 2048,
    subnet: Subnet = None,
    as_json: JsonOption = False,
) -> None:
    """Make this machine a host, with a one-use token (root). Without an option for it, the token is read from standard input.

    Again, it goes on where it was, or sees that the machine is a host and its credential good. `atoll agent run` is what works then.
    """
    from atoll.programs import joining

    shown.quiet_logs()
    wanted = _wanted(
        url,
        name=name,
        region=region,
        labels=label,
        authority=ca,
        pin=ca_pin,
        reserve=(reserve_cpu, reserve_memory, reserve_disk),
        overcommit=(overcommit_cpu, overcommit_memory, overcommit_disk),
        slots=slots,
        subnet=subnet,
    )
    place = _place(home)
    _joined(place, joining.join(place, wanted, _token(place, token_file, token_env)), as_json=as_json)


@app.command("register")
def register(  # noqa: PLR0913, PLR0917 - as `join`
    url: Url,
    key_file: KeyFile = None,
    name: Name = None,
    home: Home = None,
    region: Region = None,
    label: Labels = None,
    ca: Authority = None,
    ca_pin: Pin = None,
    reserve_cpu: ReserveCpu = None,
    reserve_memory: ReserveMemory = None,
    reserve_disk: ReserveDisk = None,
    overcommit_cpu: OverCpu = 16.0,
    overcommit_memory: OverMemory = 1.0,
    overcommit_disk: OverDisk = 8.0,
    slots: Slots = 2048,
    subnet: Subnet = None,
    as_json: JsonOption = False,
) -> None:
    """Make this machine a host by an operator's key, without a token (root). For machines that are set up by a program of yours."""
    from atoll.programs import joining

    shown.quiet_logs()
    wanted = _wanted(
        url,
        name=name,
        region=region,
        labels=label,
        authority=ca,
        pin=ca_pin,
        reserve=(reserve_cpu, reserve_memory, reserve_disk),
        overcommit=(overcommit_cpu, overcommit_memory, overcommit_disk),
        slots=slots,
        subnet=subnet,
    )
    place = _place(home)
    _joined(place, joining.register(place, wanted, api_url=url, key=_key(key_file)), as_json=as_json)


@app.command("setup")
def setup(  # noqa: PLR0913, PLR0917 - as `join`
    url: Url,
    name: Name = None,
    home: Home = None,
    region: Region = None,
    label: Labels = None,
    ca: Authority = None,
    ca_pin: Pin = None,
    reserve_cpu: ReserveCpu = None,
    reserve_memory: ReserveMemory = None,
    reserve_disk: ReserveDisk = None,
    overcommit_cpu: OverCpu = 16.0,
    overcommit_memory: OverMemory = 1.0,
    overcommit_disk: OverDisk = 8.0,
    slots: Slots = 2048,
    subnet: Subnet = None,
    as_json: JsonOption = False,
) -> None:
    """Prepare this machine to be a host, and check it, without enrolling (root): directories, addresses, configuration."""
    from atoll.programs import host_doctor, joining

    shown.quiet_logs()
    wanted = _wanted(
        url,
        name=name,
        region=region,
        labels=label,
        authority=ca,
        pin=ca_pin,
        reserve=(reserve_cpu, reserve_memory, reserve_disk),
        overcommit=(overcommit_cpu, overcommit_memory, overcommit_disk),
        slots=slots,
        subnet=subnet,
    )
    place = _place(home)
    joining.setup(place, wanted)
    shown.show_report(host_doctor.examine(place), as_json=as_json)


@app.command("doctor")
def doctor(home: Home = None, as_json: JsonOption = False) -> None:
    """Check this machine as a host: programs, isolation, disk, clock, and the way to control. Status 1 when one fails."""
    from atoll.programs import doctor as instance_doctor
    from atoll.programs import host_doctor

    shown.quiet_logs()
    place = _place(home)
    joined = place.host_config.exists()
    shown.show_report(host_doctor.examine(place) if joined else instance_doctor.examine(place), as_json=as_json)


@app.command("status")
def status(home: Home = None, as_json: JsonOption = False) -> None:
    """Show what this machine is as a host, and what it holds, without asking control. Status 4 when its agent does not run (root)."""
    from atoll.programs import joining

    seen = joining.status(_place(home))
    if as_json:
        output.document(seen)
    else:
        _show_status(seen)
    if not seen["running"]:
        raise typer.Exit(int(output.Exit.UNAVAILABLE))


@app.command("run")
def run(home: Home = None, as_json: JsonOption = False) -> None:
    """Be this machine's agent, in the foreground, until SIGTERM (root). Its log is JSON, on standard error."""
    from atoll.programs import agent_main

    del as_json
    _place(home)
    agent_main.main()


@app.command("leave")
def leave(home: Home = None, as_json: JsonOption = False) -> None:
    """Be no host any more (root): remove what is left of its sandboxes, its credential and configuration. Disable it at control first."""
    from atoll.programs import joining

    shown.quiet_logs()
    removed = joining.leave(_place(home))
    if as_json:
        output.document({"removed": removed})
    else:
        print(f"this machine is no host any more; {len(removed)} sandboxes were left over, and removed")


def _place(home: Path | None) -> Layout:
    if home is not None:
        # What is started from here is about the same home.
        os.environ["ATOLL_HOME"] = str(home.absolute())
    return layout_of()


def _wanted(  # noqa: PLR0913 - as `join`
    url: str,
    *,
    name: str | None,
    region: str | None,
    labels: list[str] | None,
    authority: Path | None,
    pin: str | None,
    reserve: tuple[str | None, str | None, str | None],
    overcommit: tuple[float, float, float],
    slots: int,
    subnet: int | None,
) -> Wanted:
    from atoll.domain.inventory import Overcommit
    from atoll.programs.hosting import DriverName, Reserve
    from atoll.programs.instance import machine_name
    from atoll.programs.joining import Wanted

    cpu, memory, disk = reserve
    return Wanted(
        url=url,
        name=name or machine_name(),
        region=region,
        labels=arguments.pairs(labels, what="label"),
        authority=authority,
        pin=pin,
        reserve=Reserve(
            arguments.cpu_millis(cpu) if cpu else 0, arguments.size_mib(memory) if memory else 0, arguments.size_mib(disk) if disk else 0
        ),
        overcommit=Overcommit(*overcommit),
        slots=slots,
        subnet=subnet,
        # Rigs and demonstrations; nobody else has a use for a host on which nothing runs.
        driver=DriverName(os.environ.get("ATOLL_AGENT_DRIVER") or DriverName.OCI),
    )


def _token(place: Layout, file: Path | None, variable: str | None) -> Secret | None:
    """The token, from wherever it is; never from the command line, which everybody on the machine can read. None: the machine has what it needs."""
    if file is not None and variable is not None:
        raise typer.BadParameter("give --token-file or --token-env, not both")
    if variable is not None:
        text = os.environ.get(variable)
        if not text:
            raise Refused(Code.ENROLLMENT_TOKEN_INVALID, f"the variable {variable} is empty or not set")
        return Secret(text.strip())
    if file is not None and str(file) != "-":
        try:
            return Secret(file.read_text().strip())
        except OSError as error:
            raise Refused(Code.ENROLLMENT_TOKEN_INVALID, f"the token in {file} cannot be read: {error.strerror}") from error
    if file is None and place.credential.exists():
        return None
    if sys.stdin.isatty():
        return Secret(typer.prompt("Token", hide_input=True, err=True).strip())
    text = sys.stdin.read(4096).strip()
    return Secret(text) if text else None


def _key(file: Path | None) -> Secret:
    if file is not None:
        try:
            return Secret(file.read_text().strip())
        except OSError as error:
            raise Refused(Code.UNAUTHENTICATED, f"the key in {file} cannot be read: {error.strerror}") from error
    key = os.environ.get("ATOLL_API_KEY")
    if not key:
        raise Refused(Code.UNAUTHENTICATED, "an operator's key is needed: --key-file, or ATOLL_API_KEY")
    return Secret(key)


def _joined(place: Layout, outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        output.document(
            {
                "hostId": outcome.host_id,
                "name": outcome.name,
                "installId": outcome.install_id,
                "new": outcome.new,
                "slots": outcome.slots,
                "home": str(place.home),
            }
        )
        return
    print(f"{outcome.name} is {outcome.host_id}" if outcome.new else f"{outcome.name} is {outcome.host_id} already; its credential is good")
    typer.echo(f"Start its agent: ATOLL_HOME={place.home} atoll agent run", err=True)


def _show_status(seen: dict[str, Any]) -> None:
    lease = seen["leaseLeftSeconds"]
    output.fields(
        [
            ("name", seen["name"]),
            ("host", seen["hostId"] or "not enrolled"),
            ("install", seen["installId"]),
            ("control", seen["control"]),
            ("agent", f"runs (pid {seen['pid']})" if seen["running"] else "does not run"),
            ("control answered", None if seen["answeredSecondsAgo"] is None else f"{seen['answeredSecondsAgo']:.0f} s ago"),
            ("lease", None if lease is None else f"{lease:.0f} s left" if lease > 0 else f"ran out {-lease:.0f} s ago"),
            ("problem", seen["problem"]),
            ("isolation", seen["isolations"]),
            ("addresses", seen["slots"]),
            ("holds", f"{len(seen['placements'])} sandboxes"),
        ]
    )
    if seen["placements"]:
        print()
        output.table(
            [
                ("ID", lambda item: item["sandboxId"]),
                ("STATE", lambda item: item["observed"]),
                ("WANTED", lambda item: item["desired"]),
                ("ADDRESS", lambda item: item["address"]),
                ("ENDS IN", lambda item: None if item["endsInSeconds"] is None else f"{item['endsInSeconds']:.0f}s"),
            ],
            seen["placements"],
            empty="",
        )
