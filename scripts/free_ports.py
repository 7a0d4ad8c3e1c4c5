#!/usr/bin/env python3
"""Print the first of N neighbouring TCP ports on loopback that nobody listens on: an instance takes three (edge, control, edge's admin).

Below the range that the kernel hands to outgoing connections, so that none of those takes one in between.
"""

from __future__ import annotations

import os
import socket
import sys

FIRST, LAST = 20000, 30000


def free(port: int) -> bool:
    """True when the port can be listened on right now, on every address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("0.0.0.0", port))
            listener.listen(1)
        except OSError:
            return False
    return True


def main() -> int:
    """Start at a place that depends on the process, so that two callers at once choose apart."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    span = (LAST - FIRST) // count
    for step in range(span):
        first = FIRST + (os.getpid() * 7 + step) % span * count
        if all(free(port) for port in range(first, first + count)):
            print(first)
            return 0
    print(f"no {count} neighbouring ports are free between {FIRST} and {LAST}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
