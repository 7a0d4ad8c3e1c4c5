"""A fake machine that outlives its agent's process, as real sandboxes do: each placement is a file. For rigs of many hosts and demonstrations.

It is a machine of its own in every respect that a scheduler can see: what runs on it goes on when the agent is killed, and is gone when its
directory is. What is done to a placement is in its file before the verb has returned.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from atoll.domain.spec import SaveMode
from atoll.drivers.fake.driver import FakeMachine, FakePlacement
from atoll.drivers.port import Image, Mark, Order, Power

_ORDER = TypeAdapter(Order)


class KeptMachine(FakeMachine):
    """`FakeMachine` in a directory. `images`: what it holds ready."""

    def __init__(self, directory: Path, *, images: Sequence[Image]) -> None:
        super().__init__(images=list(images))
        self._directory = directory
        self.inbox = directory.with_name(f"{directory.name}.inbox")
        self.inbox.mkdir(exist_ok=True, mode=0o700)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for file in sorted(directory.glob("*.json")):
            found = _read(file)
            if found is not None:
                self.placements[file.stem] = found

    def changed(self, placement_id: str) -> None:
        """Write down what became of it."""
        file = self._directory / f"{placement_id}.json"
        placement = self.placements.get(placement_id)
        if placement is None:
            file.unlink(missing_ok=True)
            return
        content = {
            "mark": [placement.mark.install_id, placement.mark.host_id],
            "order": _ORDER.dump_python(placement.order, mode="json"),
            "power": placement.power.value,
            "reason": placement.reason,
            "saved": placement.saved,
            "memory": placement.memory,
        }
        draft = file.with_suffix(".new")
        draft.write_text(json.dumps(content))
        draft.replace(file)


def _read(file: Path) -> FakePlacement | None:
    try:
        raw = json.loads(file.read_text())
        saved = SaveMode(raw["saved"]) if raw.get("saved") else None
        order = _ORDER.validate_python(raw["order"])
        return FakePlacement(Mark(*raw["mark"]), order, Power(raw["power"]), raw["reason"], saved=saved, memory=raw.get("memory", ""))
    except (ValueError, KeyError, TypeError, ValidationError):
        # Half of a write that a power cut has ended: nothing ever ran of it.
        return None
