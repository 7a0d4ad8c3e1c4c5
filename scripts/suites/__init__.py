"""How each kind of check is run and counted. Standard library only. Read `counts.py`, then `../suite.py`."""
