"""Everything that knows Spark: `checkpointLocation` directories, sessions, queries, and diagnosis.

Nothing here may import Dagster, the catalog or the snapshot store. `checkpoint_dir` handles the
files, `query` the running query, and `doctor` the diagnosis.
"""
