"""What Atoll says about itself while it runs: event names, log keys, and one way to write logs. Imports `base` only.

Read `log.py` first: `configure(process)` once in each program, `log = get_logger()` in a module. Names of events are in `events.py`,
names of fields in `keys.py`; both registries are append-only, because people search and alert by them.
"""
