"""Spark's checkpoint directory: layout and logs, consistent cuts, and restores."""
