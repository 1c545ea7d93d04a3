"""Dagster resources and config: checkpoint storage, state backend, catalog, and a stream."""
