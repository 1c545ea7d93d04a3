"""The `dagster-ckpt` command: the operations of `Client` for a terminal."""
