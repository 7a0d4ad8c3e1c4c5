"""Atoll hands out sandboxes: isolated machines that start in milliseconds and are never lost.

Rules of the house. A package imports only packages above it in this list, and the first three import no I/O, clock, dice or logging:
`base`, `domain`, `planning`, `wire`, `telemetry`, `store`, `images` and `connections`, `hostops`, `drivers`, `control` and `agent`,
`client`, `cli` and `web` and `mcp`, `programs`, `testing`. import-linter holds it. Read `docs/ARCHITECTURE.md` first, then `programs`,
which is the only place where real clocks, stores and drivers are put together.
"""
