"""The benchmark: what Atoll costs over what it is made of, both measured in one run.

`run.py` is what `make bench` calls; it imports the package and may be read first. `parts/` has one module for each table. Every figure
of ours stands beside its baseline, taken in turn with it (ours, bare, bare, ours), so that a noisy machine is noisy for both.
"""
