"""What a start begins from, and how its live directory is prepared: resume, restore, rewind, fork, retention.

Facts are gathered (`facts.py`), a plan is decided (`planning.py`, pure), and `prepare.py` carries it out.
"""
