"""A stream as the packages above see it: its handle, its lease, and the names of its snapshots.

Start with `handle.py`. `lease.py` makes a process the only writer of a stream, `liveness.py` decides
whether a process is dead, and `fencing.py` stops the query of a process that may still be alive.
"""
