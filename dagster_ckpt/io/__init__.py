"""File access: one `FileIO` for snapshots, live directories and the folders of sinks.

Start with `file_io.py`. `custom.py` is the base class for storage of your own.
"""
