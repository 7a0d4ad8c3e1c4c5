"""Whether this machine runs virtual machines, as its operator says: ATOLL_MACHINES for `atoll up`, `machines` in the files of hosts.

And by which Firecracker, if by one: `ATOLL_HOME/firecracker.toml`. No package has it, so the operator fetches it and says which it is:

```toml
firecracker = { path = "/opt/firecracker/firecracker", sha256 = "..." }
jailer = { path = "/opt/firecracker/jailer", sha256 = "..." }
[rates]                      # each machine's; leave out what is not to be limited
disk_bytes = { per_s = 209715200, burst = 1073741824 }
disk_operations = { per_s = 5000 }
network_bytes = { per_s = 125000000 }
network_packets = { per_s = 100000 }
```
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from atoll.base.errors import Code, Refused

if TYPE_CHECKING:
    from atoll.drivers.firecracker.config import FirecrackerConfig, Rates

_SHA256: Final = re.compile("[0-9a-fA-F]{64}")


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


def pinned(file: Path, cache: Path) -> FirecrackerConfig | None:
    """The Firecracker that this host is to use; None: it is to use none. *Errors*: Refused SETUP_FAILED (the file is broken)."""
    from atoll.drivers.firecracker.config import FirecrackerConfig

    if not file.exists():
        return None
    try:
        raw = tomllib.loads(file.read_text())
        (firecracker, first), (jailer, second) = (_program(raw, name) for name in ("firecracker", "jailer"))
        return FirecrackerConfig(
            cache,
            firecracker=firecracker,
            firecracker_sha256=first,
            jailer=jailer,
            jailer_sha256=second,
            rates=_rates(raw.get("rates", {})),
        )
    except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise Refused(
            Code.SETUP_FAILED,
            f"{file} cannot be used: {type(error).__name__} {error}",
            hint="docs/guides/machines.md shows what belongs into it; without the file, machines run by QEMU.",
        ) from error


def _program(raw: Mapping[str, Any], name: str) -> tuple[Path, str]:
    path, digest = Path(str(raw[name]["path"])), str(raw[name]["sha256"])
    if not path.is_absolute() or _SHA256.fullmatch(digest) is None:
        raise ValueError(f"{name} needs an absolute path and a SHA-256 of 64 digits")
    return path, digest.lower()


def _rates(raw: Mapping[str, Any]) -> Rates:
    from atoll.drivers.firecracker.config import Rate, Rates

    found = {name: Rate(int(one["per_s"]), int(one.get("burst", 0))) for name, one in raw.items()}
    if any(rate.per_s < 1 or rate.burst < 0 for rate in found.values()):
        raise ValueError("a rate is at least 1 per second")
    return Rates(**found)
