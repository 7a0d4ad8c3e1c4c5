"""One suite for every driver: what `drivers/port.py` promises, tried on the real machine.

| file | what it holds |
|---|---|
| `suite` | the cases and what each needs; `cases_for(capabilities)` is what a driver must pass |
| `life`, `limits`, `network` | the cases themselves, by subject |
| `stand` | what a case is given: the driver, orders, a way into guests, an independent look at the machine |
| `guest` | a small client of atoll-guest, for looking from inside |
| `oci_stand`, `fake_stand` | stands of the drivers that Atoll has |

A case raises AssertionError; it knows no test runner. A new driver writes a stand and runs the suite: docs/contributing/add-a-driver.
"""
