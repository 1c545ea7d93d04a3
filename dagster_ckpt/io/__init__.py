"""File access: named objects for snapshots, and directory trees for live directories.

Each has an implementation for local disks, for fsspec, and objects one for memory. Start with `objects.py` and
`folder.py`.
"""
