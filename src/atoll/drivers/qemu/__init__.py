"""Virtual machines by QEMU: `qemu`. Imports `drivers/oci` for all that machines and containers share. Read `driver.py`, then `machine.py`."""
