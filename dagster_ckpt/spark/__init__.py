"""Spark's checkpoint directories, sessions and queries, and a doctor for damage.

PySpark is imported inside functions, because reading live directories does not require it.
"""
