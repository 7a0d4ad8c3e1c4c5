"""Virtual machines by QEMU: its command line, monitor, jail, and how its memory is read. Imports `drivers/machines`. Read `machine.py`."""
