"""The simulator: real control, real agents, fake hosts and network, virtual time, seeded faults.

Read `world.py` first, then `scenario.py` for what can go wrong and `checks.py` and `verdict.py` for what is promised all the same.
`python -m atoll.testing.sim --seed N` tells one seed's story; the same seed gives the same trace in every process.
"""
