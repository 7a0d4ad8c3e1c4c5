"""`atoll status`: which programs run, whether they are well, and what they hold."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from atoll.base.errors import AtollError
from atoll.client.target import of_instance
from atoll.programs import instance, probes, supervision
from atoll.programs.layout import PROCESSES, Layout


def collect(place: Layout) -> dict[str, Any]:
    """Everything, as --json prints it. *Errors*: Refused NOT_RUNNING when there is no instance at all."""
    config = instance.load(place)
    with ThreadPoolExecutor(len(PROCESSES) + 1) as pool:
        views = list(pool.map(lambda name: probes.look(name, place, config), PROCESSES))
    supervisor = supervision.running(place)
    told: dict[str, Any] = {}
    if supervisor is not None and os.geteuid() == 0:
        try:
            told = supervision.ask(place, "status")
        except AtollError:
            told = {}
    children = told.get("children") or {}
    processes: list[dict[str, Any]] = [{**asdict(view), "restarts": (children.get(view.name) or {}).get("total")} for view in views]
    processes.append(
        {
            "name": "supervisor",
            "pid": supervisor.pid if supervisor else None,
            "address": None,
            "version": None,
            "healthy": supervisor is not None,
            "detail": "" if supervisor else "not running; `atoll up` starts it and adopts what lives",
            "restarts": None,
        }
    )
    return {
        "home": str(place.home),
        "install_id": config.install_id,
        "url": config.url,
        "domain": config.domain,
        "healthy": all(process["healthy"] for process in processes),
        "processes": processes,
        **_held(place, control_well=views[0].healthy),
    }


def _held(place: Layout, *, control_well: bool) -> dict[str, Any]:
    """What control says it holds; nothing where it can't be asked."""
    if not control_well:
        return {}
    from atoll.client.api import Api

    try:
        with Api(of_instance(place.home), timeout_s=5.0) as api:
            return {"control": api.status()}
    except AtollError as error:
        return {"control": {"error": {"code": error.code, "message": error.message}}}


def replicas(seen: dict[str, Any]) -> list[dict[str, Any]]:
    """The control processes of the deployment, as the one of this instance knows them; none where it is the only one."""
    found = (seen.get("control") or {}).get("replicas") or []
    return found if len(found) > 1 else []


def summary(seen: dict[str, Any]) -> str:
    """One line about what control holds; empty where it was not asked."""
    control = seen.get("control") or {}
    if "hosts" not in control:
        return ""
    hosts, used, capacity = control["hosts"], control["used"], control["capacity"]
    return (
        f"{hosts['healthy']} of {hosts['total']} hosts healthy, {control['sandboxes']} sandboxes, "
        f"CPU {used['cpuMillis'] / 1000:.1f} of {capacity['cpuMillis'] / 1000:.0f} cores, "
        f"memory {used['memoryMib'] / 1024:.1f} of {capacity['memoryMib'] / 1024:.1f} GiB, "
        f"disk {used['diskMib'] / 1024:.0f} of {capacity['diskMib'] / 1024:.0f} GiB"
    )
