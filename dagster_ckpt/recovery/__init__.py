"""What a start continues from, and its live directory: resume, restore, rewind, fork; and retention.

`facts.py` gathers facts, `planning.py` (pure) decides on a plan, `prepare.py` carries it out.
"""
