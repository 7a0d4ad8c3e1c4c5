"""E2B's API, as its unmodified clients speak it, translated to `Service`. E2B's words live here only.

Read `routes.py` for the surface, then `sandboxes.py`; `answers.py` makes what goes back, `requests.py` reads what comes in.
"""
