"""Measurements beside peers, in the same run: `make bench` writes docs/evidence/performance.md.

Start with `__main__.py` for what is run, `sections/` for what is measured, and `engine.py` for what is called.
"""
