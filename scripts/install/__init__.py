"""The steps that turn a fresh machine into one that can run and test Atoll. Standard library only: nothing is installed yet.

Each module holds one kind of step; `steps.py` puts them in order and says which wait for which; `../setup.py` is the command. A step is
idempotent and leaves a stamp, so that a second run looks at a few files and ends. Read `progress.py` first.
"""
