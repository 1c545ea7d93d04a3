"""Spark's checkpoint directory: its layout and logs, a consistent cut of it, and how to build one from a snapshot.

Start with `layout.py` and `cut.py` for the way from directory to snapshot, `restore.py` for the way back.
"""
