"""Spark's checkpoint directory: layout and logs, consistent cuts, and restoring a directory from a snapshot.

Start with `layout.py` and `cut.py` for the way to a snapshot, and with `restore.py` for the way back.
"""
