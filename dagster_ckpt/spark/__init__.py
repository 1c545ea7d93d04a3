"""Everything that knows Spark: `checkpointLocation` directories, sessions, queries, and diagnosis.

Nothing here imports Dagster. `checkpoint_dir` handles the files, `query` the running query, and `doctor` the
diagnosis. PySpark is imported inside functions: reading live directories does not require it.
"""
