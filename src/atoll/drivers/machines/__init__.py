"""What the drivers of virtual machines share: `qemu`, `firecracker`. Imports `drivers/oci` for what machines and containers share. Read `driver.py`.

| a line about | belongs into |
|---|---|
| a directory, slot, control group, look or removal, of any guest | `drivers/oci` |
| what is tried before machines may start, and what the self-check says | `driver.py` |
| a machine's files, and the order of its start, save and restore | `runtime.py` |
| what a machine is told of itself | `telling.py` |
| the image as a disk, and what it is made of; the network; the namespaces and files around its program; what is said to the guest | `roots.py`, `erofs.py`; `tap.py`; `cell.py`; `line.py` |
| what a machine has known since it booted, and must find where it goes on | `birth.py` |
| one program's words: command line, API, jail, the form of what it saves | `drivers/qemu`, `drivers/firecracker` |
"""
