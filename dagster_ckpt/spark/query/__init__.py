"""Spark sessions and streaming queries: describe, start and observe a query, and read its plan."""
