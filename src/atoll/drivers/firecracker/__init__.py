"""Virtual machines by Firecracker: its jailer, API and snapshots. Imports `drivers/machines`. Read `machine.py`, then `shape.py`."""
