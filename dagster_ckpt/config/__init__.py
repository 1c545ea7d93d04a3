"""Configuration as frozen values. Each option is validated once and describes its effect on Spark.

Start with `checkpoint_config.py`. Nothing here opens a file, starts a session or reads a clock.
"""
