"""Dagster resources and config: where snapshots are stored, how Spark keeps state, the catalog, a stream."""
