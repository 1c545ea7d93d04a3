"""Spark sessions and streaming queries: starting one, observing it, and reading its plan.

Start with `query.py` for a running query and `description.py` for one that is not started.
"""
