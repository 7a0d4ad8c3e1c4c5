"""Freezing guests by their control groups: one write, read back from the machine, whatever the runtime. Blocking.

Not by the runtime's own `pause`: gVisor's counts how often it was asked, in the sentry, and says so in a file a moment later, so that a
program that is killed in between leaves a guest of which nobody can tell how often it must be resumed (docs/adr/0025).
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.base.errors import Code, Refused
from atoll.drivers.oci import look
from atoll.drivers.oci.look import View
from atoll.drivers.port import Seen
from atoll.hostops import cgroups


def freeze(view: View, placement_id: str, slots: Mapping[int, str]) -> Seen:
    """As Driver.pause."""
    _require_guest(view, placement_id, slots)
    if not cgroups.freeze(view.layout, view.group(placement_id)):
        raise Refused(Code.PAUSE_FAILED, f"{placement_id} does not come to a halt")
    return look.seen(look.traces(view, placement_id, slots))


def thaw(view: View, placement_id: str, slots: Mapping[int, str]) -> Seen:
    """As Driver.resume."""
    _require_guest(view, placement_id, slots)
    cgroups.thaw(view.layout, view.group(placement_id))
    return look.seen(look.traces(view, placement_id, slots))


def _require_guest(view: View, placement_id: str, slots: Mapping[int, str]) -> None:
    """*Errors*: Refused PLACEMENT_LOST, NOT_SUPPORTED."""
    if not cgroups.freezes(view.layout):
        raise Refused(Code.NOT_SUPPORTED, "this machine has no freezer for control groups")
    if look.traces(view, placement_id, slots).guest is None:
        raise Refused(Code.PLACEMENT_LOST, f"{placement_id} has no guest that could be frozen or thawed")
