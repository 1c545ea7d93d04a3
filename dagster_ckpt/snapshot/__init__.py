"""The snapshot format and the store of snapshots: writing, reading, sharing and deleting their bytes.

Nothing here knows Spark or the lifecycle of a stream: named byte streams go in, named byte streams come out. Start with
docs/snapshot-format.md, then `manifest.py`, `writer.py` and `reader.py`; `store.py` is the interface of every store.
"""
