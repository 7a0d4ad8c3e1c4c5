"""`atoll down`: end all sandboxes, stop the programs, leave nothing on the machine but the instance's directory.

Theory of operation. The orderly way first: control releases every sandbox of the operator's team, so that each has its end on record. What
is left after that (other teams', or all when control does not answer) is removed by the drivers directly, by mark; the agent of the next
`up` reports them absent, and control then records their end.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Final

from atoll.base.errors import AtollError, Code, Refused
from atoll.client.target import of_instance
from atoll.programs import hosting, identity, instance, probes, supervision
from atoll.programs.files import exclusive
from atoll.programs.layout import PROCESSES, Layout
from atoll.programs.steps import Steps
from atoll.programs.users import require_root

RELEASE_S: Final = 60.0


@dataclass(slots=True)
class Outcome:
    """What `down` did, for --json."""

    was_running: bool = False
    released: int = 0
    swept: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)


def down(place: Layout, steps: Steps, *, keep_sandboxes: bool = False) -> Outcome:
    """Stop the instance. *Idempotency*: nothing running is fine. *Errors*: CLEANUP_FAILED names what could not be removed."""
    require_root("atoll down")
    outcome = Outcome()
    try:
        config = instance.load(place)
    except Refused as error:
        if error.code is Code.NOT_RUNNING:
            steps.say(f"There is no instance in {place.home}.")
            return outcome
        raise
    with exclusive(place.home):
        _down(place, config, steps, outcome, keep_sandboxes=keep_sandboxes)
    return outcome


def _down(place: Layout, config: instance.Config, steps: Steps, outcome: Outcome, *, keep_sandboxes: bool) -> None:
    names = [name for name in (*PROCESSES, "supervisor") if identity.living(place.pid_file(name)) is not None]
    outcome.was_running = bool(names)
    if not keep_sandboxes and probes.look("control", place, config).healthy and probes.look("agent", place, config).pid is not None:
        with steps.step("release sandboxes") as step:
            outcome.released, left = _release_all(place)
            step.detail = f"{outcome.released} released" + (f", {left} not gone yet" if left else "")
    with steps.step("stop programs") as step:
        outcome.stopped = supervision.stop(place)
        step.detail = ", ".join(outcome.stopped) or "none ran"
    if not keep_sandboxes:
        with steps.step("clean the machine") as step:
            from atoll.programs import agent_main

            outcome.swept = asyncio.run(agent_main.sweep(place, hosting.of_instance(config)))
            step.detail = f"{len(outcome.swept)} left over, removed" if outcome.swept else "nothing left"


def _release_all(place: Layout) -> tuple[int, int]:
    """Ask for the end of every living sandbox of the operator's team, and wait until they are gone; (released, not gone in time)."""
    from atoll.client.api import Api

    released = 0
    with Api(of_instance(place.home, {}), timeout_s=20.0) as api:
        deadline = time.monotonic() + RELEASE_S
        asked: set[str] = set()
        while True:
            living = _living(api)
            for sandbox in living:
                sandbox_id = str(sandbox["id"])
                if sandbox_id in asked:
                    continue
                asked.add(sandbox_id)
                try:
                    api.release(sandbox_id)
                    released += 1
                except AtollError:
                    continue
            if not living or time.monotonic() > deadline:
                return released, len(living)
            time.sleep(0.1)


def _living(api: Any) -> list[dict[str, Any]]:
    try:
        return [item for item in api.sandboxes() if item.get("state") not in {"released", "failed"}]
    except AtollError:
        return []
