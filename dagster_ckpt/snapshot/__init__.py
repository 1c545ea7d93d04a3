"""The snapshot format and its stores, without Spark or streams. Start with docs/snapshot-format.md and `store.py`."""
