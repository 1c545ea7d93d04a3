"""Spark's checkpoint directory: layout and logs, consistent cuts, and restoring a directory from a snapshot."""
