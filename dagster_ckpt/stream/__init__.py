"""A stream as the packages above see it: its handle, its lease, and its snapshots.

Start with `handle.py`. `lease.py` makes a process the only writer, `liveness.py` decides whether a process is dead,
`fencing.py` stops the query of one that may be alive, and `snapshotting.py` takes a snapshot.
"""
