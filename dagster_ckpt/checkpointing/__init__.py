"""Taking snapshots: when to take one, and how to take it from a running or a stopped query.

`coordinator` makes the decisions and is pure; `snapshotting.py` does the work.
"""
