"""Decides what a start continues from and prepares its live directory: resume, restore, rewind, fork; and retention.

Start with `facts.py`, which gathers facts, `planning.py` (pure), which decides on a plan, and
`prepare.py`, which carries it out. Nothing here starts a query.
"""
