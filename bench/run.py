"""Measure, print, and write docs/PERFORMANCE.md. Needs root, the built programs and the base template (`make bench` sees to them).

    bench/run.py                      everything, about half an hour on two cores
    bench/run.py --quick              fewer rounds: for a look, not for the record
    bench/run.py --only create-runsc  one part or some (may be repeated); the document stays as it is
    bench/run.py --only NAME --record put these parts into the document, each with its own conditions, and leave all else of it
    bench/run.py --json FILE          also keep every value
    bench/run.py --from FILE          write the document anew from kept values

ATOLL_BENCH_HOME names a running instance to measure; otherwise one is started for the run and removed afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from rich.console import Console  # noqa: E402 - the path is set first

from bench import product, report  # noqa: E402
from bench.bare import Bare  # noqa: E402
from bench.clients import Api  # noqa: E402
from bench.findings import Finding  # noqa: E402
from bench.parts import PARTS  # noqa: E402
from bench.world import World  # noqa: E402

DOCUMENT = ROOT / "docs" / "PERFORMANCE.md"


def main() -> int:
    options = _options()
    console = Console()
    if options.source is not None:
        content = json.loads(options.source.read_text())
        DOCUMENT.write_text(report.document(content["conditions"], [Finding.of_json(one) for one in content["findings"]]))
        return 0
    if os.geteuid() != 0:
        console.print("the benchmark starts runtimes and needs root")
        return 2
    try:
        conditions, findings = asyncio.run(_measure(options, console))
    except product.CannotMeasure as error:
        console.print(f"[red]{error}[/red]")
        return 1
    if options.json is not None:
        content = {"conditions": conditions, "findings": [finding.as_json() for finding in findings]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    report.verdicts(console, findings)
    if options.only is None and not options.quick:
        DOCUMENT.write_text(report.document(conditions, findings))
        console.print(f"written: {DOCUMENT.relative_to(ROOT)}")
    elif options.record and not options.quick:
        DOCUMENT.write_text(report.added(DOCUMENT.read_text(), conditions, findings))
    return 0


async def _measure(options: argparse.Namespace, console: Console) -> tuple[dict[str, str], list[Finding]]:
    wanted = [part for part in PARTS if options.only is None or any(part.name.startswith(name) for name in options.only)]
    findings: list[Finding] = []
    with product.instance(os.environ.get("ATOLL_BENCH_HOME")) as instance:
        os.environ.update(instance.environment)
        conditions = report.conditions(quick=options.quick)
        work = Path(tempfile.mkdtemp(prefix="atoll-bare.", dir="/var/tmp"))
        async with Api(instance) as api, Bare(work) as bare:
            world = World(api, bare, options.quick, lambda text: console.print(f"[dim]{text}[/dim]"))
            for part in wanted:
                world.say(f"{part.name}: {part.about}")
                try:
                    finding = await part.measure(world)
                except product.CannotMeasure as error:
                    # What has been measured before is worth keeping.
                    finding = Finding(part.name, part.about, [], notes=[f"Not measured: {error}"])
                finding.notes.append(f"Load average afterwards: {report.load()}.")
                report.table(console, finding)
                findings.append(finding)
    return conditions, findings


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], epilog=f"parts: {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--only", action="append", metavar="NAME", help="only parts whose name begins so")
    parser.add_argument("--record", action="store_true", help="with --only: put these parts into the document, with their own conditions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every value there")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="write the document from kept values")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.only or () if not any(part.name.startswith(name) for part in PARTS)]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
