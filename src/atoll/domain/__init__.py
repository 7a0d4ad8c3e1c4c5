"""One file per aggregate: its fields, its states and its transition table. Pure; imports only `base`.

Read `sandbox.py` first, then `placement.py`. docs/STATES.md is generated from the tables.
"""
