"""Configuration as values: checked once, frozen, each option with its effect on Spark.

Nothing here opens a file, starts a session, reads a clock or imports Dagster. Start with `checkpoint_config.py`.
"""
