"""The vocabulary: ids, units, errors, clocks. No behaviour, no I/O; imports nothing of Atoll.

Read `errors.py` first: every refusal a user can meet is named there.
"""
