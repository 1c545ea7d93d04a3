"""Taking snapshots: when to take one, and how it is taken from a running or a stopped query.

`coordinator` decides and is pure; `snapshotting.py` does the work.
"""
