"""The rows of a query's state, read (`reading.py`) and written (`rewriting.py`) with Spark.

`spark/checkpoint_dir/` handles the files without Spark.
"""
