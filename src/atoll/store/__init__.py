"""Where decisions are kept. Functions here are short and synchronous, take a connection and await nothing.

Read `engine.py` for how they run (one writer, group commit), `tables.py` for what is kept, `facts.py` for the commits of a sandbox.
Tenant secrets are sealed (`sealing.py`) before they come near a row.
"""
