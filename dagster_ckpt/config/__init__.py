"""Configuration as frozen values, without side effects and without Dagster. Start with `checkpoint_config.py`."""
