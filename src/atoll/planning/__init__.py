"""Facts in, plan out: resolve, admission, placement, capacity, reconcile. Pure; imports `base` and `domain` only.

Read `reconcile.py` first: it decides every state change of a sandbox.
"""
