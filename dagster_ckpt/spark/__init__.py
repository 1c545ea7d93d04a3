"""Everything that knows Spark: `checkpointLocation` directories, sessions, queries, and diagnosis.

Nothing here imports Dagster. PySpark is imported inside functions: reading live directories does not require it.
"""
