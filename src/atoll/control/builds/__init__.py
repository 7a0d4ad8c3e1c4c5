"""Builds of templates: asked for, carried out step by step, published.

Read `builds.py` first (what APIs ask, who owns a build), then `builder.py` (one run) and `port.py` (what it needs of the world, kept apart
so that a test can stand in for sandboxes); `workshop.py` is the real one, made of ordinary sandboxes. What a step means is decided by
`planning/recipes.py`.
"""
