"""Applying a state backend to a Spark session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_ckpt.errors import OptionError
from dagster_ckpt.options.state_backend import StateBackend

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def apply_state_backend(spark: SparkSession, backend: StateBackend) -> dict[str, str]:
    """Set a backend's settings on a session; queries started from then on use them.

    A query that resumes keeps the provider it began with: Spark pins it in the offset log.

    Args:
        spark: The session, classic or Spark Connect.
        backend: The backend.

    Returns:
        The settings that were changed, with their new values.

    Raises:
        OptionError: A setting belongs to the application and can no longer be changed.
    """
    changed: dict[str, str] = {}
    for name, value in backend.spark_settings().items():
        if spark.conf.get(name, None) == value:
            continue
        if not _can_be_set(spark, name):
            raise OptionError(
                f"The state backend sets {name} to {value!r}, but this session has "
                f"{spark.conf.get(name, None)!r} and Spark "
                "reads it only when the application starts. Give it to the Spark resource's configuration "
                "instead."
            )
        spark.conf.set(name, value)
        changed[name] = value
    return changed


def _can_be_set(spark: SparkSession, name: str) -> bool:
    # Spark knows the RocksDB settings only inside their provider, and calls them not modifiable.
    return name.startswith("spark.sql.streaming.") or spark.conf.isModifiable(name)
