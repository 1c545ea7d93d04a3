"""The snapshot format and snapshot stores: write, read, share and delete the bytes of snapshots.

Nothing here knows Spark or the lifecycle of a stream. Start with docs/snapshot-format.md and `store.py`.
"""
