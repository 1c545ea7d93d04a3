"""What knows Spark: `checkpointLocation` directories, sessions, queries, and diagnosis.

PySpark is imported inside functions: reading live directories does not require it.
"""
