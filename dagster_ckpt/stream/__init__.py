"""A stream as the packages above see it: its handle, its lease, and the names of its snapshots.

Start with `handle.py`. `lease.py` makes a process the only writer of a stream, and `liveness.py`
decides whether a process is dead.
"""
