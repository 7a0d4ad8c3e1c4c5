"""What a machine has known since it booted, and goes on believing wherever it goes on: so it must be so there.

| fact | why |
|---|---|
| its image's disk | its kernel has read what is where on it (`erofs.py`) |
| how fast its clock counts | an emulated guest was told, and cannot find out |
| which processor it has | with hardware virtualization a guest sees its host's |

Not among them is its kernel: that is in its memory, and no file of it is read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = "root"
CLOCK: Final = "tsc_khz"
PROCESSOR: Final = "processor"
CLOCK_PPM_MAX: Final = 1000
"""What a guest's clock may go wrong where it goes on: a second in a quarter of an hour. It is set after each restore. *Units*: millionths."""
CPUINFO: Final = Path("/proc/cpuinfo")


def differs(born: Mapping[str, str], here: Mapping[str, str]) -> str:
    """What is not here as it was where a machine booted, for people; empty: nothing. What either does not know is not compared."""
    if _differ(born, here, ROOT):
        return "its image is laid out on another disk here"
    if _differ(born, here, PROCESSOR):
        return f"it has seen another processor than this one: {born[PROCESSOR]}, and here it is {here[PROCESSOR]}"
    was, now = (_number(known.get(CLOCK, "")) for known in (born, here))
    if was and now and abs(was - now) * 1_000_000 > CLOCK_PPM_MAX * was:
        return f"its clock counts by {was} kHz, and this host's goes with {now}"
    return ""


def _differ(born: Mapping[str, str], here: Mapping[str, str], name: str) -> bool:
    was, now = born.get(name, ""), here.get(name, "")
    return bool(was and now) and was != now


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def processor() -> str:
    """Maker, family, model and stepping of this host's, as its kernel says. Blocking. *Errors*: OSError."""
    known: dict[str, str] = {}
    for line in CPUINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        known.setdefault(name.strip(), value.strip())
    names = ("vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU part", "CPU variant")
    return " ".join(known[name] for name in names if name in known)
