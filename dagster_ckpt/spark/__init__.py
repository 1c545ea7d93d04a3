"""What knows Spark: `checkpointLocation` directories, sessions, queries, and diagnosis; it never imports Dagster.

PySpark is imported inside functions: reading live directories does not require it.
"""
