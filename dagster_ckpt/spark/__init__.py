"""Everything that knows Spark: `checkpointLocation` directories, sessions, queries, and what is wrong with them.

No Dagster, no catalog and no snapshot store may be imported here. `checkpoint_dir` has the files, `query` the running
query, `doctor` the examinations.
"""
