"""Which failures mean that the state a query was started on is damaged, as a table of what was said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dagster_ckpt import errors
from dagster_ckpt.recovery.damage import damage_in, damage_of

CASES = yaml.safe_load((Path(__file__).parent / "damages.yaml").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["says"])
def test_what_a_failure_says_of_the_state(case: dict[str, Any]) -> None:
    found = damage_in(case["trace"])

    assert (found and found.error) == case["error"]
    assert (found is not None and found.is_certain) == case["certain"]
    assert found is None or found.detail


class PySparkError(Exception):
    """An error as PySpark raises it at a start: the frames are not in its message."""

    _stackTrace = (  # noqa: N815 - as PySpark names it
        'java.lang.NumberFormatException: Error at index 1 in: "4?df"\n'
        "\tat org.apache.spark.sql.execution.streaming.runtime.StreamExecution.<init>(StreamExecution.scala:188)"
    )


@pytest.mark.parametrize(
    ("error", "is_damage"),
    [
        (errors.SnapshotCorruptError("x"), True),
        (errors.SnapshotNotFoundError("x"), True),
        (errors.RestoreError("x"), True),
        (errors.IncompleteCutError("x"), True),
        (errors.SinkRollbackError("x"), False),
        (errors.RowsAtRiskError("x"), False),
        (errors.UnknownLayoutError("x"), False),
        (errors.StorageAccessError("x"), False),
        (errors.LeaseLostError("x"), False),
        (errors.CatalogError("x"), False),
        (RuntimeError("ClassNotFoundException: kafka"), False),
        (PySparkError('Error at index 1 in: "4?df"'), True),
        (RuntimeError(CASES[0]["trace"]), True),
    ],
)
def test_what_an_error_of_a_start_says_of_the_point_it_began_from(error: Exception, is_damage: bool) -> None:
    assert (damage_of(error) is not None) is is_damage
