"""Images on this host: which templates are ready, where their root file systems are, and whether they are what they claim.

Read `cache.py`. Imports `base` only; building images is not here yet (`make up` bootstraps the base template).
"""
