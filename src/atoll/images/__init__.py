"""Images on this host: which templates are ready, where their root file systems are, and whether they are what they claim.

Read `cache.py`, then `carrier.py` (the program that moves bytes) and `unpacking.py`. Imports `base` only.
"""
