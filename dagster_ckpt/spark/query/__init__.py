"""Spark sessions and streaming queries: start a query, observe it, and read its plan.

Start with `query.py` for a running query and with `description.py` for one that is not started.
"""
