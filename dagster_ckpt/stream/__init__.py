"""One stream as everything above sees it: its handle, its lease, and the names of its snapshots.

Start with `handle.py`; `lease.py` makes a process the only writer, `liveness.py` decides whether a process is dead.
"""
