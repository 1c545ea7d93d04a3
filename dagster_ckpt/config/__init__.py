"""Configuration as frozen values. Each option is validated once and describes its effect on Spark.

Nothing here opens a file, starts a session, reads a clock or imports Dagster. Start with
`checkpoint_config.py`.
"""
