"""How placing is explained on a terminal: a sentence, what each filter removes, and a line for each host."""

from __future__ import annotations

from typing import Any

from atoll.cli import output

_UNITS = (("cpuMillis", 1000, ""), ("memoryMib", 1, " MiB"), ("diskMib", 1, " MiB"))


def show(told: dict[str, Any], *, host: str | None = None) -> None:
    """`host`: only this one's line, by id or name."""
    need = told["need"]
    size = ", ".join(
        f"{need[name] / divisor:g}{unit} {what}" for (name, divisor, unit), what in zip(_UNITS, ("CPU", "memory", "disk"), strict=True)
    )
    print(f"class {told['class']}, policy {told['policy']}, needs {size}")
    if told.get("placement"):
        print(f"placed on {told['placement']['hostId']}")
    elif told.get("state"):
        print(f"not placed, {told['state']}")
    print(f"{told['candidates']} of {told['hosts']} hosts fit")
    if told["removed"]:
        print()
        output.table(
            [
                ("FILTER", lambda item: item["filter"]),
                ("REMOVES", lambda item: item["hosts"]),
                ("ALONE", lambda item: item["alone"]),
            ],
            told["removed"],
            empty="",
        )
    verdicts = told.get("verdicts")
    if not verdicts:
        return
    chosen = [one for one in verdicts if host is None or host in (one["hostId"], one["name"])]
    print()
    output.table(
        [
            ("HOST", lambda item: item["name"]),
            ("ASKED", _asked),
            ("IMAGE", lambda item: "held" if item["hasImage"] else "-"),
            ("FREE CPU", lambda item: f"{item['free']['cpuMillis'] / 1000:g}"),
            ("FREE MEMORY", lambda item: f"{item['free']['memoryMib']} MiB"),
            ("FREE DISK", lambda item: f"{item['free']['diskMib']} MiB"),
            ("SLOTS", lambda item: str(item["free"]["slots"])),
            ("WHY NOT", _why_not),
        ],
        chosen,
        empty=f"No host {host!r} among those that are shown.",
    )
    if len(verdicts) < told["hosts"]:
        print(f"{told['hosts'] - len(verdicts)} more hosts are counted and not shown; --limit shows more")


def _asked(item: dict[str, Any]) -> str:
    if item["refused"]:
        return "refused"
    return f"{item['rank']}." if item["rank"] is not None else "-"


def _why_not(item: dict[str, Any]) -> str:
    return "; ".join(f"{one['filter']} ({one['detail']})" if one["detail"] else one["filter"] for one in item["objections"])
