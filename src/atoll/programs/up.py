"""`atoll up`: from built programs to a running instance with a first sandbox done.

Theory of operation. Every step can be repeated: what is there is kept. When the instance runs already and is well, up says so; when the
code on the disk is newer than what runs, or `control.toml` has changed, the programs concerned are started anew, under sandboxes that go
on; when a supervisor is gone but its children live, the new one adopts them.
"""

from __future__ import annotations

import compileall
import os
import shlex
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import AtollError, Code, Refused, Unavailable
from atoll.client.target import Target, of_instance
from atoll.images import signing
from atoll.images.trust import KEYS_FILE, keep_keys
from atoll.planning.placing import Filter
from atoll.programs import demo, edge_config, export, instance, layout, machines, ports, probes, registry_config, supervision
from atoll.programs.children import fingerprint
from atoll.programs.files import exclusive, read_json
from atoll.programs.identity import living
from atoll.programs.layout import PROCESSES, Layout
from atoll.programs.steps import Steps, duration, wait_for
from atoll.programs.users import Account, closed_on_the_way, ensure_account, require_root

BINARIES: Final = ("atoll-guest", "atoll-io", "atoll-registry", "runsc")
TEMPLATE: Final = "base"
WAIT_S: Final = {"control": 40.0, "agent": 60.0, "edge": 20.0, "registry": 20.0}
HOST_S: Final = 60.0
DEATHS_MAX: Final = 5
FAILING_S: Final = 10.0
"""How long failed checks of the host may last before they count: a self-test may be late on a machine that is busy starting."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `up` did, for --json."""

    already_running: bool
    steps: list[dict[str, Any]]
    demo: dict[str, Any] | None
    environment: dict[str, str]


def up(place: Layout, steps: Steps, *, with_demo: bool = True) -> Outcome:
    """Have the instance running and proven. *Errors*: AtollError; `steps.failed` names the step."""
    require_root("atoll up")
    steps.say(f"Atoll in {place.home}")
    with steps.step("programs") as step:
        step.detail = _check_programs()
    with exclusive(place.home):
        code = fingerprint()
        already = _is_well(place, code)
        if already:
            config = instance.load(place)
            with steps.step("running already") as step:
                step.detail = f"on {config.url}"
            _renew(place, steps, code)
        else:
            config = _start(place, steps, code)
        _wait_healthy(place, config, steps)
    target = of_instance(place.home, {})
    with steps.step("host") as step:
        step.detail = _wait_host(place, config, target)
    shown = _first_sandbox(target, steps) if with_demo else None
    values = export.variables(place, config)
    _epilogue(place, steps, values)
    return Outcome(already, [asdict(done) for done in steps.done], asdict(shown) if shown else None, values)


def _check_programs() -> str:
    directory = layout.bin_directory()
    missing = [name for name in BINARIES if not os.access(directory / name, os.X_OK)]
    if missing:
        raise Refused(
            Code.RUNTIME_MISSING,
            f"{', '.join(missing)} not found in {directory}",
            hint="Run `make up`, which builds them, or set ATOLL_BIN.",
        )
    if shutil.which("crun") is None and shutil.which("runc") is None:
        raise Refused(Code.RUNTIME_MISSING, "neither crun nor runc is on the path", hint="`apt-get install crun`, or run `make up`.")
    manifest = layout.cache_directory() / "templates" / TEMPLATE / "current" / "manifest.json"
    if not manifest.exists():
        raise Refused(
            Code.IMAGE_UNAVAILABLE,
            f"there is no template {TEMPLATE}: {manifest} is missing",
            hint="Run `make up`, which bootstraps it, or set ATOLL_CACHE.",
        )
    return str(directory)


def _is_well(place: Layout, code: str) -> bool:
    """Whether everything runs, is the code that is on the disk now, and listens where ATOLL_PORT says."""
    if supervision.running(place) is None:
        return False
    try:
        config = instance.load(place)
        if supervision.ask(place, "status").get("fingerprint") != code:
            return False
    except AtollError:
        return False
    wanted = instance.port_wanted()
    if wanted is not None and wanted != config.port:
        return False
    if machines.wanted() not in (None, config.machines):
        return False
    return all(living(place.pid_file(name)) is not None for name in PROCESSES)


def _renew(place: Layout, steps: Steps, code: str) -> None:
    """Start those programs anew that read settings which the operator has changed since; the others go on."""
    if not (changed := supervision.outdated(place, code)):
        return
    with steps.step("new settings") as step:
        for name in changed:
            supervision.restart(place, name)
        step.detail = f"{', '.join(changed)} started anew (sandboxes go on)"


def _start(place: Layout, steps: Steps, code: str) -> instance.Config:
    if supervision.running(place) is not None:
        with steps.step("stop what is older") as step:
            step.detail = ", ".join(supervision.stop(place)) + " (sandboxes go on)"
    elif stopped := supervision.stop_outdated(place, code):
        with steps.step("stop what is older") as step:
            step.detail = ", ".join(stopped) + " (sandboxes go on)"
    with steps.step("user") as step:
        user = ensure_account()
        problem = instance.home_problem(place, user) or _reach_problem(user)
        if problem is not None:
            raise problem
        step.detail = f"{user.name} ({user.uid})"
    with steps.step("instance") as step:
        config = _prepare(place, user)
        step.detail = f"{config.install_id}, slots in {config.slot_cidr}"
    with steps.step("ports") as step:
        _check_ports(place, config)
        step.detail = f"{config.port} to {config.admin_port}"
    with steps.step("supervisor") as step:
        # Control's user may not write next to the code; compiled once by root, it starts in half the time.
        compileall.compile_dir(layout.repository() / "src" / "atoll", quiet=2, workers=1)
        step.detail = f"pid {supervision.start(place)}"
    return config


def _reach_problem(user: Account) -> AtollError | None:
    """Why control could not start: what it needs besides the checkout lies where its user may not go."""
    needed = {
        "the interpreter": Path(sys.executable).resolve().parent,
        "the templates": layout.cache_directory() / "templates" / TEMPLATE / "current",
    }
    for what, path in needed.items():
        closed = None if path.is_relative_to(layout.repository()) else closed_on_the_way(path.resolve(), user)
        if closed is not None:
            return Refused(
                Code.SETUP_FAILED,
                f"user {user.name}, which control runs as, cannot pass {closed} to {what} in {path}",
                hint=f"`chmod o+x {closed}`, or make the environment with the system's Python and put ATOLL_CACHE elsewhere.",
            )
    return None


def _prepare(place: Layout, user: Account) -> instance.Config:
    instance.ensure_directories(place, user)
    alive = any(living(place.pid_file(name)) is not None for name in PROCESSES)
    config = instance.ensure_config(place, port=instance.port_wanted(), dice=os.urandom, may_move=not alive, machines=machines.wanted())
    instance.ensure_secrets(place, user, os.urandom)
    instance.ensure_bootstrap(place, user, config)
    if not (place.agent / KEYS_FILE).exists():
        # As a machine that joins is told them: from then on this host follows by signatures alone.
        keep_keys(place.agent, signing.load(place.secrets).current)
    edge_config.write(place, config, user)
    registry_config.write(place, user)
    return config


def _check_ports(place: Layout, config: instance.Config) -> None:
    """Each port must be free, unless the program that it is for lives and will be adopted."""
    needed = config.ports()
    if living(place.pid_file("control")) is not None:
        needed.pop("control")
    if living(place.pid_file("edge")) is not None:
        needed.pop("the edge")
        needed.pop("the edge's admin side")
    ports.require_free(needed)


def _wait_healthy(place: Layout, config: instance.Config, steps: Steps) -> None:
    for name in PROCESSES:
        with steps.step(name) as step:
            view = _wait_one(place, config, name)
            step.detail = f"pid {view.pid}" + (f", {view.version}" if view.version else "") + (f", {view.address}" if view.address else "")


def _wait_one(place: Layout, config: instance.Config, name: str) -> probes.ProcessView:
    failing_since: float | None = None

    def look() -> probes.ProcessView | None:
        nonlocal failing_since
        view = probes.look(name, place, config)
        if view.pid is None and _deaths(place, name) >= DEATHS_MAX:
            raise _not_well(place, name, f"keeps ending ({_deaths(place, name)} times)")
        failed = _failed_checks(place) if name == "agent" and not view.healthy else []
        failing_since = (failing_since or time.monotonic()) if failed else None
        if failing_since is not None and time.monotonic() - failing_since > FAILING_S:
            raise _host_unfit(failed)
        return view if view.healthy else None

    def problem() -> AtollError:
        detail = probes.look(name, place, config).detail
        return _not_well(place, name, f"is not well after {WAIT_S[name]:.0f} s: {detail}")

    return wait_for(look, within_s=WAIT_S[name], problem=problem)


def _failed_checks(place: Layout) -> list[dict[str, Any]]:
    """What the running agent found wrong with this machine, and would keep it from taking sandboxes."""
    record = read_json(place.agent_health) or {}
    running = living(place.pid_file("agent"))
    if running is None or record.get("pid") != running.pid:
        return []
    return [check for check in record.get("checks") or [] if check.get("fatal") and not check.get("ok")]


def _host_unfit(failed: list[dict[str, Any]]) -> AtollError:
    found = "; ".join(dict.fromkeys(f"{check.get('id')}: {check.get('detail')}" for check in failed))
    fixes = "; ".join(dict.fromkeys(str(check["fix"]) for check in failed if check.get("fix")))
    return Refused(
        Code.SETUP_FAILED, f"this machine takes no sandboxes: {found}", hint=f"{fixes or 'See the checks'}. `atoll doctor` shows them all."
    )


def _deaths(place: Layout, name: str) -> int:
    """How often in a row this supervisor saw it end too soon."""
    try:
        return int(supervision.ask(place, "status")["children"][name]["in_a_row"])
    except (AtollError, KeyError, TypeError):
        return 0


def _not_well(place: Layout, name: str, what: str) -> AtollError:
    last = _last_words(place.log_file(name))
    return Unavailable(
        Code.SETUP_FAILED,
        f"{name} {what}" + (f"; its last words: {last}" if last else ""),
        hint=f"Its log is {place.log_file(name)}; `atoll doctor` checks this machine.",
    )


def _last_words(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    telling = [line for line in lines if '"level":"error"' in line or "Error" in line]
    return (telling or lines or [""])[-1][:400]


def _wait_host(place: Layout, config: instance.Config, target: Target) -> str:
    """Wait until control would place a sandbox here: the host is active, healthy, without problems, and has an image."""
    from atoll.client.api import Api

    seen: dict[str, Any] = {}
    with Api(target, timeout_s=10.0) as api:

        def look() -> dict[str, Any] | None:
            nonlocal seen
            try:
                hosts = [host for host in api.hosts() if host.get("name") == config.host_name]
            except Unavailable:
                return None
            seen = hosts[0] if hosts else {}
            return seen if seen and not _why_not(seen) else None

        def problem() -> AtollError:
            return Unavailable(
                Code.NO_HOSTS,
                f"host {config.host_name} takes no sandboxes: {_why_not(seen) or 'it is not enrolled'}",
                hint=f"`atoll doctor` names the failed checks with their fixes; the agent's log is {place.log_file('agent')}.",
            )

        host = wait_for(look, within_s=HOST_S, problem=problem)
    return f"{config.host_name}: {', '.join(sorted(host.get('isolations') or []))}"


def _why_not(host: dict[str, Any]) -> str:
    if host.get("admin") not in (None, "active"):
        return f"it is {host['admin']}"
    if host.get("health") != "healthy":
        return f"its health is {host.get('health')}"
    if host.get("problems"):
        return f"failed checks: {', '.join(map(str, host['problems']))}"
    if not host.get("isolations"):
        return "no isolation passed its self-test"
    return ""


def _first_sandbox(target: Target, steps: Steps) -> demo.Demo:
    with steps.step("first sandbox") as step:
        try:
            shown = demo.run(target)
        except Unavailable as error:
            if str(Filter.ISOLATION_UNAVAILABLE) not in error.message:
                raise
            hint = "The host failed its self-test of the isolation that was asked for: `atoll doctor` names the check with its fix."
            raise Unavailable(error.code, error.message, hint=hint) from error
        step.detail = shown.sandbox_id + (f" ({shown.isolation})" if shown.isolation else "")
    steps.say()
    for what, elapsed_ms, said in (
        ("create", shown.create_ms, ""),
        (f"$ {shown.command}", shown.command_ms, shown.command_said),
        (f"$ python3 -c {shlex.quote(demo.PYTHON)}", shown.python_ms, shown.python_said),
        ("remove", shown.remove_ms, ""),
    ):
        steps.say(f"  {duration(elapsed_ms):>8}  {what}")
        for line in said.splitlines():
            steps.say(f"            {line}")
    return shown


def _epilogue(place: Layout, steps: Steps, values: dict[str, str]) -> None:
    atoll = export.command(place)
    steps.say()
    steps.say("Point any E2B SDK, or `atoll` itself, at it:")
    steps.say(export.lines(values))
    steps.say()
    steps.say("Next:")
    steps.say(f'  1. eval "$({atoll} env)"                    # in each shell that should use it')
    steps.say(f"  2. {atoll} sandbox create --shell            # a terminal in a sandbox of your own")
    steps.say("  3. pip install e2b && python -c \"from e2b import Sandbox; print(Sandbox.create().commands.run('uname -a').stdout)\"")
