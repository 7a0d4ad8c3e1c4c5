"""`python -m atoll.testing.sim --seed N [--count K] [--trace]`: run seeds, print each trace's digest, stop at the first broken promise."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback

from atoll.telemetry import log
from atoll.testing.sim.world import World, simulate


def main() -> int:
    """Exit code 1 when a promise is broken."""
    parser = argparse.ArgumentParser(prog="atoll.testing.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--trace", action="store_true")
    arguments = parser.parse_args()
    log.configure("sim", "critical")
    logging.disable(logging.CRITICAL)
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        begun = time.monotonic()
        try:
            world: World = simulate(seed)
        except Exception:  # noqa: BLE001 - whatever broke, the seed is what a reader needs
            traceback.print_exc()
            print(f"seed {seed}: broken; repeat with: make sim SEED={seed}", file=sys.stderr)
            return 1
        if arguments.trace:
            print("\n".join(world.trace))
        print(f"seed {seed}: {world.trace[-1][:16]} {len(world.trace)} events, {time.monotonic() - begun:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
