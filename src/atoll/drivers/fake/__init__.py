"""A driver without a machine: placements are rows in memory, guests are nothing. For tests, the simulator and load on control.

It passes the same conformance suite as real drivers for what it declares. Read `driver.py`.
"""
