"""Spark sessions and streaming queries: describe, start and observe a query, and read its plan.

Start with `query.py` for a running query, and `description.py` for one that is not started.
"""
