"""Whether this machine runs virtual machines, as its operator says: ATOLL_MACHINES for `atoll up`, `machines` in the files of hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum

from atoll.base.errors import Code, Refused


class Machines(StrEnum):
    """What the operator allows."""

    OFF = "off"
    KVM = "kvm"
    """Where a guest boots with hardware virtualization."""
    EMULATED = "emulated"
    """Also without it, some fifteen times slower."""


def wanted(environ: Mapping[str, str] = os.environ) -> Machines | None:
    """ATOLL_MACHINES; None: as it is. *Errors*: Refused INVALID_REQUEST."""
    text = environ.get("ATOLL_MACHINES")
    if not text:
        return None
    try:
        return Machines(text)
    except ValueError:
        known = ", ".join(Machines)
        raise Refused(Code.INVALID_REQUEST, f"ATOLL_MACHINES={text} is none of {known}", hint="Set it to one of these.") from None
