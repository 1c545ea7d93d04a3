"""The code that executes inside a Dagster run of a stream."""
