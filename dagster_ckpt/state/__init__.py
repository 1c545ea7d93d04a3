"""The rows of a query's state, read and written with Spark.

Files of state belong to `checkpoint_dir/state/`, which needs no Spark. Start with `reading.py` for keys
and values, and with `rewriting.py` for state in another shape or with other rows.
"""
