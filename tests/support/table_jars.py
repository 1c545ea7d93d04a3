"""The jars of Delta and Iceberg that run on the Spark at hand, from Maven Central."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagster_ckpt.spark.versions import TableFormat, installed_release
from tests.support.maven import from_maven

# A catalog of Iceberg in SQLite.
SQLITE = ("org.xerial", "sqlite-jdbc", "3.50.3.0")


def needs_jar(table: TableFormat) -> pytest.MarkDecorator:
    """Skip a test on a Spark that a table format has no release for."""
    return pytest.mark.skipif(
        table not in installed_release().jars, reason=f"no {table.name.title()} runs on {installed_release()}"
    )


def fetch_jars(table: TableFormat, folder: Path) -> None:
    """Fetch the jars of a table format into a folder."""
    group, name, version = installed_release().jars[table].split(":")
    also = (group, "delta-storage", version) if table is TableFormat.DELTA else SQLITE
    for module in ((group, name, version), also):
        from_maven(folder, module, "master")
