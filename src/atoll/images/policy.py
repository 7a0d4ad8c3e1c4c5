"""What an operator has said of a host's images: limits and pins, in one file of root's (`agent/image-cache.json`)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.images.whole import write_whole

FILE: Final = "image-cache.json"
SIZE_MIB_MAX: Final = 50 * 1024
BLOBS_MIB_MAX: Final = 10 * 1024
"""Of blobs that were fetched: what images share is not fetched again, and trees need none of them any more."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What an operator has said of this host's images. *Units*: MiB."""

    trees_mib_max: int = SIZE_MIB_MAX
    blobs_mib_max: int = BLOBS_MIB_MAX
    pins: frozenset[str] = field(default_factory=frozenset)


def load(path: Path) -> Policy:
    """*Errors*: Refused SETUP_FAILED when the file is broken."""
    try:
        raw = json.loads(path.read_bytes())
        return Policy(int(raw["trees_mib_max"]), int(raw["blobs_mib_max"]), frozenset(str(one) for one in raw["pins"]))
    except FileNotFoundError:
        return Policy()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(Code.SETUP_FAILED, f"{path} cannot be used: {type(error).__name__}", hint="Remove it, and pin again.") from error


def save(path: Path, policy: Policy) -> None:
    """Whole or not at all."""
    content = json.dumps({**asdict(policy), "pins": sorted(policy.pins)}, indent=1).encode() + b"\n"
    write_whole(path, content)
