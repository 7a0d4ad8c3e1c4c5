"""A strict Firecracker and jailer for tests: real processes that take what the real ones take, and refuse the rest. Read `program.py`.

What Firecracker's OpenAPI description says is checked against the file itself (`contract.py`) where ATOLL_FIRECRACKER_CONTRACT names it; the
order of things and what no schema says are rules of this room's own (`rules.py`). Behind it a machine is emulated by QEMU (`engine.py`), so what is
told by the API boots, is saved and goes on; or nothing is (`--engine none`), where only the talk is of interest.
"""
