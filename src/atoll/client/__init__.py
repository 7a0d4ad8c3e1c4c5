"""Our own HTTP client: `/v1` of control and the guest's envd contract, synchronous, with Atoll's errors. Imports `base` only.

Read `api.py` first (control), then `guest.py` (what is inside a sandbox). `target.py` finds out where to send and with which key;
`connect.py` is the framing of streams, without I/O.
"""
