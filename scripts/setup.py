#!/usr/bin/env python3
"""Make this machine ready for Atoll: `make up` and `make test` start here, with the system's Python and nothing installed.

    scripts/setup.py                      everything that running needs
    scripts/setup.py --for test           everything that the test suite needs, which includes the former
    scripts/setup.py --only base runsc    some steps, without those that they come after
    scripts/setup.py --list               the steps
    scripts/setup.py --verify-base        read every byte of the cached base template; status 1 when it is broken or missing

A second run looks at stamps and ends at once. Status 0: all is there. Status 1: a step failed; what, why and what to do was printed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))

PYTHON_MIN = (3, 11)


def main() -> int:
    """Parse, take the checkout's lock, run."""
    if sys.version_info < PYTHON_MIN:
        print(f"Atoll needs Python >= 3.11, this is {sys.version.split()[0]}. Debian 12 has it: apt-get install python3", file=sys.stderr)
        return 1
    from install import base_template, progress, steps  # after the check: this syntax would stop an older Python first

    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--for", dest="purpose", choices=steps.PURPOSES, default="run")
    options.add_argument("--only", nargs="+", metavar="STEP", default=[])
    options.add_argument("--list", action="store_true")
    options.add_argument("--verify-base", action="store_true")
    chosen = options.parse_args()

    if chosen.verify_base:
        directory = base_template.template_directory()
        problem = base_template.verify(directory, full=True)
        print(f"{directory}: {problem or 'whole'}")
        return 1 if problem else 0

    available = steps.steps_for("test") if chosen.only else steps.steps_for(chosen.purpose)
    if chosen.list:
        for step in available:
            print(f"{step.name:10} {step.title}" + (f" (after {', '.join(step.after)})" if step.after else ""))
        return 0
    unknown = set(chosen.only) - {step.name for step in available}
    if unknown:
        options.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(step.name for step in available)}")
    wanted = [step for step in available if not chosen.only or step.name in chosen.only]
    needing_root = [step.name for step in wanted if step.name in steps.NEED_ROOT]
    if os.geteuid() != 0 and needing_root:
        print(f"Not root: {', '.join(needing_root)} change this machine. Run it as root (sudo make up).", file=sys.stderr)
        return 1

    progress.BUILD.mkdir(exist_ok=True)
    with (progress.BUILD / ".setup-lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another set-up of this checkout is running, waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        return 0 if progress.run_steps(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
