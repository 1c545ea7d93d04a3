"""The snapshot format and snapshot stores: write, read, share and delete the bytes of snapshots.

Nothing here knows Spark or the lifecycle of a stream. Start with docs/snapshot-format.md, then `entries.py` and
`manifest.py`; `store.py` has the interface of every store.
"""
