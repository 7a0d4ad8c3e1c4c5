"""Hostile images: `forging.py` makes them, `cases.py` is the list. `test_hostile_images.py` beside this package runs it."""
