"""The simulator: real control, real agents, fake hosts and network, virtual time, seeded faults.

Read `world.py` first. `python -m atoll.testing.sim --seed N` runs one seed and prints its trace's digest; the same seed gives the same
trace in every process. Invariants (`checks.py`) are looked at after every commit, convergence after everything has healed.
"""
