"""`atoll agent doctor` on a machine that joined over the network: the agent's registry of checks, and the way to control.

Whatever it says, it changes nothing but what the runtime's self-test makes and removes.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from atoll.base.errors import AtollError, Refused
from atoll.programs import doctor, hosting
from atoll.programs.doctor import Entry
from atoll.programs.hosting import DriverName, HostConfig
from atoll.programs.layout import Layout


def examine(place: Layout) -> dict[str, Any]:
    """Run everything; the report that --json prints."""
    entries = doctor.looked("instance.root", doctor.root)
    isolations: list[str] = []
    try:
        config = hosting.load(place)
    except Refused as error:
        entries.append(Entry("host.config", "failed", error.message, "Run `atoll agent join`."))
    else:
        addresses = f", addresses in {config.slot_cidr}" if config.slot_cidr else ""
        entries.append(Entry("host.config", "ok", f"{config.name} of {config.install_id}{addresses}"))
        if config.driver is DriverName.OCI:
            entries += doctor.looked("instance.programs", doctor.programs)
            entries += doctor.looked("instance.oci_runtime", doctor.runtime)
            entries += doctor.looked("instance.templates", doctor.templates)
        entries += asyncio.run(_control(config))
        if os.geteuid() == 0:
            found, isolations = asyncio.run(doctor.host_checks(place, config))
        else:
            found, isolations = doctor.told(place)
        entries += found
    entries = doctor.once(entries)
    return {
        "ok": all(entry.result != "failed" for entry in entries),
        "isolations": isolations,
        "hosts": {},
        "checks": [entry.shown() for entry in entries],
    }


async def _control(config: HostConfig) -> list[Entry]:
    """Each replica: reachable, trusted, of our install, of our time."""
    return [entry for url in config.control for entry in await _replica(config, url)]


async def _replica(config: HostConfig, url: str) -> list[Entry]:
    from atoll.agent.transport import HttpTransport

    check = f"control.document.{url}"
    sent = time.time()
    try:
        control = HttpTransport(url, authority=config.authority)
        try:
            document = await control.well_known()
        finally:
            await control.close()
    except AtollError as error:
        return [Entry(check, "failed", f"{error.message} [{error.code}]", error.hint)]
    half_way = (sent + time.time()) / 2
    if document.install_id != config.install_id:
        fix = "Correct `control` in host.toml."
        return [Entry(check, "failed", f"{url} is install {document.install_id}, this host is of {config.install_id}", fix)]
    skew_s, most_s = half_way - document.now, document.rules.clock_skew_s_max
    clock = Entry(
        f"control.clock.{url}",
        "ok" if abs(skew_s) <= most_s else "failed",
        f"this machine's clock is {skew_s:+.1f} s ahead of control's, {most_s:g} s are allowed",
        "Set the clock by NTP on both machines.",
    )
    verified = "verified" if url.startswith("https:") else "this machine"
    return [Entry(check, "ok", f"{url} ({verified}), version {document.version}"), clock]
