"""`atoll doctor`: the agent's registry of checks, and what concerns the instance as a whole."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from atoll.base.errors import AtollError, Refused
from atoll.programs import agent_main, hosting, instance, layout, ports, probes, supervision, users
from atoll.programs.files import read_json
from atoll.programs.identity import living
from atoll.programs.layout import Layout

_SEVERITY: Final = {"ok": 0, "warning": 1, "failed": 2}
_AS_ROOT: Final = "Run `sudo atoll doctor`."
BINARIES: Final = ("atoll-guest", "atoll-io", "runsc")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the report. `result` is `ok`, `failed`, or `warning` (something to know, which stops nothing)."""

    id: str
    result: str
    detail: str
    fix: str = ""

    def shown(self) -> dict[str, str]:
        return {"id": self.id, "result": self.result, "detail": self.detail, "fix": self.fix if self.result != "ok" else ""}


def examine(place: Layout) -> dict[str, Any]:
    """Run everything; the report that --json prints. Changes nothing but what the runtime's self-test makes and removes."""
    entries = [
        *looked("instance.root", root),
        *looked("instance.programs", programs),
        *looked("instance.oci_runtime", runtime),
        *looked("instance.templates", templates),
    ]
    isolations: list[str] = []
    hosts: dict[str, list[str]] = {}
    try:
        config = instance.load(place)
    except Refused as error:
        entries.append(Entry("instance.config", "failed", error.message, error.hint))
    else:
        entries.append(Entry("instance.config", "ok", f"{config.install_id}, slots in {config.slot_cidr}"))
        entries += looked("instance.user", lambda: _home(place))
        entries += looked("instance.secrets", lambda: _secrets(place))
        entries += looked("instance.port", lambda: _ports(place, config))
        entries += looked("process", lambda: _processes(place, config))
        if os.geteuid() == 0:
            found, isolations = asyncio.run(host_checks(place, hosting.of_instance(config)))
            hosts = _hosts(place)
        else:
            found, isolations = told(place)
        entries += found
    entries = once(entries)
    return {
        "ok": all(entry.result != "failed" for entry in entries),
        "isolations": isolations,
        "hosts": hosts,
        "checks": [entry.shown() for entry in entries],
    }


def looked(check: str, look: Callable[[], Entry | list[Entry]]) -> list[Entry]:
    """What a look found. What it cannot read is that check's result: the others are told all the same."""
    try:
        found = look()
    except OSError as error:
        if os.geteuid() != 0 and isinstance(error, PermissionError):
            return [Entry(check, "warning", f"only root can look: {error}", _AS_ROOT)]
        return [Entry(check, "failed", str(error), "Look at the path and its permissions.")]
    return found if isinstance(found, list) else [found]


def once(entries: list[Entry]) -> list[Entry]:
    """Each check once: what both drivers look at is told once, as the worse of the two found it."""
    worst: dict[str, Entry] = {}
    for entry in entries:
        known = worst.get(entry.id)
        if known is None or _SEVERITY[entry.result] > _SEVERITY[known.result]:
            worst[entry.id] = entry
    return list(worst.values())


def root() -> Entry:
    if os.geteuid() == 0:
        return Entry("instance.root", "ok", "runs as root")
    return Entry("instance.root", "failed", "does not run as root: some checks of this host are left out", _AS_ROOT)


def programs() -> Entry:
    directory = layout.bin_directory()
    missing = [name for name in BINARIES if not os.access(directory / name, os.X_OK)]
    if missing:
        return Entry("instance.programs", "failed", f"{', '.join(missing)} not in {directory}", "Run `make up`, which builds them.")
    return Entry("instance.programs", "ok", f"{', '.join(BINARIES)} in {directory}")


def runtime() -> Entry:
    found = [name for name in ("crun", "runc") if shutil.which(name)]
    if not found:
        return Entry("instance.oci_runtime", "failed", "neither crun nor runc is on the path", "Run `make up`, or `apt-get install crun`.")
    return Entry("instance.oci_runtime", "ok", ", ".join(found))


def templates() -> Entry:
    """Read now: what the agent says of its images is as old as its last probe."""
    from atoll.images.cache import ImageCache

    cache = ImageCache(layout.cache_directory())
    broken = cache.problems()
    for name in cache.names():
        try:
            cache.current(name)
        except Refused as error:
            broken.append(error.message)
    if broken or not cache.names():
        detail = "; ".join(dict.fromkeys(broken)) or f"no template in {layout.cache_directory()}"
        return Entry("instance.templates", "failed", detail, "Run `make up`, which builds the base template again.")
    return Entry("instance.templates", "ok", f"{', '.join(cache.names())} in {layout.cache_directory()}")


def _home(place: Layout) -> Entry:
    user = users.account()
    if user is None:
        return Entry("instance.user", "failed", f"there is no user {layout.USER}", "Run `atoll up`, which makes it.")
    problem = instance.home_problem(place, user)
    if problem is not None:
        return Entry("instance.user", "failed", problem.message, problem.hint)
    return Entry("instance.user", "ok", f"{user.name} ({user.uid}) can reach {place.home}")


def _secrets(place: Layout) -> Entry:
    if os.geteuid() != 0:
        return Entry("instance.secrets", "warning", "only root can look", _AS_ROOT)
    for name in instance.SECRETS:
        path = place.secrets / name
        if not path.exists() or not path.stat().st_size:
            return Entry("instance.secrets", "failed", f"{path} is missing or empty", "Run `atoll up`, which makes it.")
        if path.stat().st_mode & 0o077:
            return Entry("instance.secrets", "failed", f"{path} can be read by others", f"chmod 600 {path}")
    return Entry("instance.secrets", "ok", f"{len(instance.SECRETS)} files, readable by their owner only")


def _ports(place: Layout, config: instance.Config) -> list[Entry]:
    """A port that a program of ours should have, and another one has."""
    owner = {"the edge": "edge", "control": "control", "the edge's admin side": "edge"}
    entries = []
    for purpose, port in config.ports().items():
        check = f"instance.port.{port - config.port}"
        ours = living(place.pid_file(owner[purpose]))
        who = ports.listener(port)
        if who is None:
            entries.append(Entry(check, "ok", f"{port} ({purpose}): nobody listens"))
        elif who.pid is None or (ours is not None and who.pid == ours.pid):
            entries.append(Entry(check, "ok", f"{port} ({purpose}): {who.command[:60]}"))
        else:
            fix = "Stop that program or choose another port: ATOLL_PORT=PORT atoll up."
            entries.append(Entry(check, "failed", f"{port} ({purpose}) is taken by {who.command} (pid {who.pid})", fix))
    return entries


def _processes(place: Layout, config: instance.Config) -> list[Entry]:
    entries = []
    for name in layout.PROCESSES:
        view = probes.look(name, place, config)
        fix = f"`atoll up` starts what does not run; {place.log_file(name)} says why it ended."
        result = "ok" if view.healthy else "failed"
        entries.append(Entry(f"process.{name}", result, view.detail or f"pid {view.pid}, version {view.version}", fix))
    supervised = supervision.running(place) is not None
    fix = "`atoll up` starts it; until then nothing restarts what dies."
    entries.append(Entry("process.supervisor", "ok" if supervised else "failed", "runs" if supervised else "does not run", fix))
    return entries


async def host_checks(place: Layout, config: hosting.HostConfig) -> tuple[list[Entry], list[str]]:
    """The agent's registry, and which isolations passed their self-test.

    While the agent runs, what its own run found is taken: a second one beside it would make slots and guests under the same mark.
    """
    from atoll.agent import doctor

    settings = agent_main.agent_config(place, config)
    around = doctor.agent_checks(lock_path=settings.lock_path, credential_path=settings.credential_path, control_url=settings.control_url)
    entries = [_entry(finding) for finding in await doctor.Registry(around).run()]
    if _agent_pid(place) is None:
        with agent_main.agent_stopped(place):
            found, isolations = await _own_run(place, config)
        return entries + found, isolations
    found, isolations = told(place)
    return entries + found, isolations


def told(place: Layout) -> tuple[list[Entry], list[str]]:
    """What the running agent found, which everybody may read."""
    record, pid = read_json(place.agent_health), _agent_pid(place)
    if record is None or pid is None or record.get("pid") != pid:
        fix = f"Wait a moment and try again; {place.log_file('agent')} says what it waits for."
        return [Entry("agent.heard", "failed", "control has not answered the agent yet", fix)], []
    return [_reported(check) for check in record.get("checks") or []], [str(name) for name in record.get("isolations") or []]


def _agent_pid(place: Layout) -> int | None:
    """Of the agent that runs, whoever started it: the supervisor writes it down, and of any other its lock tells."""
    from atoll.agent.lock import holder_of

    running = living(place.pid_file("agent"))
    if running is not None:
        return running.pid
    try:
        holder = holder_of(place.agent / "lock")
    except PermissionError:
        return None
    return int(holder) if holder is not None and holder.isdigit() else None


async def _own_run(place: Layout, config: hosting.HostConfig) -> tuple[list[Entry], list[str]]:
    """Without an agent: open the drivers, run every check, close them."""
    from atoll.agent import doctor
    from atoll.agent.config import load_identity
    from atoll.domain.spec import Isolation
    from atoll.programs.clock import SystemClock
    from atoll.programs.machines import Machines

    settings = agent_main.agent_config(place, config)
    known = load_identity(settings.credential_path)
    general = doctor.host_checks(state_directory=settings.state_directory, clock=SystemClock(), disk_reserve_mib=settings.disk_reserve_mib)
    entries = [_entry(finding) for finding in await doctor.Registry(general).run()]
    passed: list[str] = []
    for isolation, driver in agent_main.drivers(place, config, host_id=known.host_id if known else "").items():
        try:
            await driver.open(agent_main.no_news)
        except (AtollError, OSError) as error:
            entries.append(Entry(f"driver.{isolation}", "failed", str(error), getattr(error, "hint", "Run `make up`.")))
            continue
        try:
            found = await doctor.Registry(doctor.driver_checks({isolation: driver})).run()
        finally:
            await driver.close()
        # The operator has said that machines may run without hardware virtualization, so the want of it is nothing to mend.
        spared = isolation is Isolation.VM and config.machines is Machines.EMULATED
        entries += [_entry(replace(finding, fatal=finding.fatal and not spared)) for finding in found]
        if all(finding.ok or not finding.fatal for finding in found):
            passed.append(str(isolation))
    return entries, passed


def _entry(finding: Any) -> Entry:
    return Entry(finding.id, "ok" if finding.ok else "failed" if finding.fatal else "warning", finding.detail, finding.fix)


def _reported(check: dict[str, Any]) -> Entry:
    result = "ok" if check.get("ok") else "failed" if check.get("fatal") else "warning"
    return Entry(str(check.get("id")), result, str(check.get("detail") or ""), str(check.get("fix") or ""))


def _hosts(place: Layout) -> dict[str, list[str]]:
    """What the hosts of this deployment really isolate with, as control knows it; empty when it can't be asked."""
    from atoll.client.api import Api
    from atoll.client.target import of_instance

    try:
        with Api(of_instance(place.home, {}), timeout_s=5.0) as api:
            return {str(host.get("name")): [str(name) for name in host.get("isolations") or []] for host in api.hosts()}
    except AtollError:
        return {}
