"""What commands that act on this machine share: how its checks are shown, and how quiet its parts are beside that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from atoll.cli import output

_RESULTS = {"ok": "ok", "failed": "FAILED", "warning": "warning"}


def quiet_logs() -> None:
    """Parts that log are used here by a person's command: warnings go to standard error, the rest nowhere."""
    from atoll.telemetry.log import configure

    configure("atoll", "warning")


def show_report(report: Mapping[str, Any], *, as_json: bool) -> None:
    """A doctor's report: each check with its result and fix, and what the machine isolates with. Status 1 when one failed."""
    if as_json:
        output.document(report)
    else:
        output.table(
            [
                ("CHECK", lambda item: item["id"]),
                ("RESULT", lambda item: _RESULTS[item["result"]]),
                ("DETAIL", lambda item: item["detail"]),
                ("FIX", lambda item: item["fix"]),
            ],
            report["checks"],
            empty="No checks.",
        )
        print(f"\nThis host isolates with: {', '.join(report['isolations']) or 'nothing that passed its self-test'}")
        offers: Mapping[str, Sequence[str]] = report["hosts"]
        for name, isolations in offers.items():
            print(f"Host {name} offers: {', '.join(isolations) or 'nothing'}")
    if not report["ok"]:
        raise typer.Exit(int(output.Exit.FAILED))
