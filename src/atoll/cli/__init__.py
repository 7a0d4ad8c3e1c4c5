"""The command line. Speaks `client` only; process commands (`up`, `down`...) are added by `programs.main`.

Read `app.py` first, then `output.py`, which holds what all commands share: tables for people, JSON for scripts, exit codes.
"""
