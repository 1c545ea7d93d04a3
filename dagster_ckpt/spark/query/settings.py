"""Apply settings to a Spark session: those of a state backend, and temporary ones while queries are started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dagster_ckpt.config.redaction import shown_settings
from dagster_ckpt.config.state_backend import StateBackend
from dagster_ckpt.errors import OptionError
from dagster_ckpt.spark.versions import refuse_unknown_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def apply_state_backend(spark: SparkSession, backend: StateBackend) -> dict[str, str]:
    """Set a backend's settings on a session; queries that start afterwards use them.

    A query that resumes keeps its original provider, which Spark pins in the offset log.

    Args:
        spark: The session, classic or Spark Connect.
        backend: The backend.

    Returns:
        The settings that were changed, with their new values.

    Raises:
        OptionError: A setting belongs to the application and can no longer be changed.
        UnsupportedSparkError: This version of Spark would ignore a setting.
    """
    return _apply(spark, backend.spark_settings(), "The state backend")


@contextmanager
def settings_for_a_while(spark: SparkSession, settings: Mapping[str, str], source: str) -> Iterator[None]:
    """Set some settings on a session temporarily, and restore the previous values.

    A query uses the settings that its session has when the query starts, and keeps them.

    Args:
        spark: The session.
        settings: The settings, by full name.
        source: Where they come from, in messages.

    Raises:
        OptionError: A setting belongs to the application and can no longer be changed; none is
            changed then.
        UnsupportedSparkError: This version of Spark would ignore a setting.
    """
    before = {name: spark.conf.get(name, None) for name in settings}
    try:
        _apply(spark, settings, source)
        yield
    finally:
        for name, value in before.items():
            if spark.conf.get(name, None) != value:
                spark.conf.unset(name) if value is None else spark.conf.set(name, value)


def _apply(spark: SparkSession, settings: Mapping[str, str], source: str) -> dict[str, str]:
    refuse_unknown_settings(spark.version, settings)
    changed: dict[str, str] = {}
    for name, value in settings.items():
        if spark.conf.get(name, None) == value:
            continue
        if not _can_be_set(spark, name):
            raise OptionError(
                f"{source} sets {name} to {shown_settings({name: value})[name]!r}, but this session has "
                f"{shown_settings({name: spark.conf.get(name, None)})[name]!r} and Spark "
                "reads it only when the application starts. Give it to the Spark resource's configuration "
                "instead."
            )
        spark.conf.set(name, value)
        changed[name] = value
    return changed


def _can_be_set(spark: SparkSession, name: str) -> bool:
    # Spark knows the RocksDB settings only inside their provider, and reports them as not
    # modifiable.
    return name.startswith("spark.sql.streaming.") or spark.conf.isModifiable(name)
