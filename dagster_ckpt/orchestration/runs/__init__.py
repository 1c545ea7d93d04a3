"""What happens inside a Dagster run of a stream."""
