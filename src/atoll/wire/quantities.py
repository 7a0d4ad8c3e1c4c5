"""Amounts as operators write them, each with its unit: `500m` of a core, `512MiB`, `90s`, `200/s`.

A number without a unit is refused where a unit could be guessed wrongly, and so is a unit that says something else than people mean by
it: `512MB` is not 512 MiB, and `5M` is not five minutes.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Final

from pydantic import BeforeValidator

_NUMBER: Final = r"([0-9]{1,12}(?:\.[0-9]{1,6})?)"
_DURATION: Final = re.compile(_NUMBER + r"(ms|s|m|h|d)")
_SIZE: Final = re.compile(_NUMBER + r"(MiB|GiB|TiB)")
_CORES: Final = re.compile(_NUMBER)
_MILLIS: Final = re.compile(r"([0-9]{1,9})m")
_RATE: Final = re.compile(_NUMBER + r"/(s|m|h)")

SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MIB: Final = {"MiB": 1, "GiB": 1024, "TiB": 1024 * 1024}
DURATION_S_MAX: Final = 10 * 365 * 86400
MIB_MAX: Final = 2**31 - 1
MILLIS_MAX: Final = 2**31 - 1


def duration_s(value: object) -> float:
    """*Units*: seconds. *Errors*: ValueError that says how to write it."""
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(_wants("a time", value, "30s, 5m, 2h or 250ms", {"S": "s", "H": "h", "D": "d", "sec": "s", "min": "m"}))
    seconds = round(float(found[1]) * SECONDS[found[2]], 6)
    if seconds > DURATION_S_MAX:
        raise ValueError("longer than ten years")
    return seconds


def whole_seconds(value: object) -> int:
    """*Units*: seconds, none of them begun only. *Errors*: ValueError."""
    seconds = duration_s(value)
    if seconds != int(seconds) or seconds < 1:
        raise ValueError("whole seconds are wanted here, at least 1s")
    return int(seconds)


def size_mib(value: object) -> int:
    """*Units*: MiB. *Errors*: ValueError that says how to write it."""
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(
            _wants("an amount", value, "512MiB, 2GiB or 1TiB", {"MB": "MiB", "GB": "GiB", "TB": "TiB", "M": "MiB", "G": "GiB"})
        )
    mib = float(found[1]) * MIB[found[2]]
    if mib != int(mib) or mib > MIB_MAX:
        raise ValueError(f"whole MiB are wanted here, at most {MIB_MAX}")
    return int(mib)


def cpu_millis(value: object) -> int:
    """*Units*: millicores; a bare number is cores. *Errors*: ValueError that says how to write it."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        millis = value * 1000.0
    elif isinstance(value, str) and (found := _MILLIS.fullmatch(value)):
        millis = float(found[1])
    elif isinstance(value, str) and _CORES.fullmatch(value):
        millis = float(value) * 1000
    else:
        raise ValueError(_wants("CPU", value, "2, 0.5 (cores) or 250m (thousandths of one)", {}))
    if not 0 <= millis <= MILLIS_MAX or not math.isclose(millis, round(millis), abs_tol=1e-6):
        raise ValueError(f"whole thousandths of a core are wanted here, 0m to {MILLIS_MAX}m")
    return round(millis)


def per_second(value: object) -> float:
    """*Units*: requests a second. *Errors*: ValueError that says how to write it."""
    found = _RATE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(_wants("a rate", value, "200/s, 600/m or 1000/h", {}))
    rate = float(found[1]) / SECONDS[found[2]]
    if rate <= 0:
        raise ValueError("a rate must be more than nothing; to close a door, take away its keys")
    return rate


def _wants(what: str, value: object, forms: str, meant: dict[str, str]) -> str:
    text = str(value)[:40]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{text} has no unit; {what} is written like {forms}"
    unit = text.lstrip("0123456789.")
    if unit in meant:
        return f"{text!r} is not {what}; {unit!r} is written {meant[unit]!r} here"
    return f"{text!r} is not {what}; it is written like {forms}"


Duration = Annotated[float, BeforeValidator(duration_s)]
WholeSeconds = Annotated[int, BeforeValidator(whole_seconds)]
SizeMib = Annotated[int, BeforeValidator(size_mib)]
CpuMillis = Annotated[int, BeforeValidator(cpu_millis)]
PerSecond = Annotated[float, BeforeValidator(per_second)]


def write_duration(seconds: float) -> str:
    """The shortest form that reads back as the same."""
    for unit in ("d", "h", "m", "s"):
        amount = seconds / SECONDS[unit]
        if amount >= 1 and amount == int(amount):
            return f"{int(amount)}{unit}"
    if seconds * 1000 == int(seconds * 1000):
        return f"{int(seconds * 1000)}ms"
    return f"{seconds:.6f}".rstrip("0").rstrip(".") + "s"


def write_mib(mib: int) -> str:
    """The shortest form that reads back as the same."""
    for unit in ("TiB", "GiB"):
        if mib and mib % MIB[unit] == 0:
            return f"{mib // MIB[unit]}{unit}"
    return f"{mib}MiB"


def write_cpu(millis: int) -> str:
    """Cores where they are whole, else thousandths."""
    return str(millis // 1000) if millis % 1000 == 0 else f"{millis}m"


def cpu_form(millis: int) -> int | str:
    """As it stands in a document: a bare number where it is whole cores."""
    return millis // 1000 if millis % 1000 == 0 else write_cpu(millis)


def write_rate(per_s: float) -> str:
    """The form with the shortest number that reads back as the same."""
    for unit in ("s", "m", "h"):
        amount = per_s * SECONDS[unit]
        if amount == int(amount):
            return f"{int(amount)}/{unit}"
    return f"{per_s:.6f}".rstrip("0").rstrip(".") + "/s"
