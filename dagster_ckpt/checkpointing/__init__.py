"""Taking snapshots: when to take one, and how to take it from a running or a stopped query.

Start with `coordinator`, which makes the decisions and is pure, and `snapshotting.py`, which does
the work. The loop that drives the coordinator is in `runtime/`.
"""
