"""File access: one `FileIO` for snapshots, live directories and the folders of sinks.

Start with `file_io.py`. Implementations: `local.py`, `fsspec.py`, `memory.py`, and `custom.py`, the
base class for storage of your own. `durability.py` flushes.
"""
