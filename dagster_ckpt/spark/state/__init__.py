"""The rows of a query's state, read with Spark: keys and values of every operator.

Files of state belong to `checkpoint_dir/state/`, which needs no Spark. Start with `reading.py`.
"""
