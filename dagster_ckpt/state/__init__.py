"""The rows of a query's state, read and written with Spark; `spark/checkpoint_dir/` handles the files without it.

Start with `reading.py` for keys and values, and `rewriting.py` for another shape or other rows.
"""
