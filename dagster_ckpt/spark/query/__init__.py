"""Spark sessions and streaming queries: describe, start and observe them."""
