-- The catalog of checkpoints, beside the database of the Dagster instance.
CREATE DATABASE checkpoints OWNER dagster;
