"""File access: object spaces for snapshots, and directory trees for live directories.

Both have implementations for local disks and for fsspec; object spaces also have one in memory.
Start with `objects.py` and `folder.py`.
"""
