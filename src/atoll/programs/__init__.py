"""Composition roots: the only place with real clocks, dice, stores, drivers and processes. May import everything but `testing`.

Read `main.py` first (the command `atoll`), then `up.py`, `supervisor.py`, and the three programs that it keeps alive:
`control_main.py`, `agent_main.py` and the edge, whose configuration `edge_config.py` writes. `layout.py` says where everything is.
"""
