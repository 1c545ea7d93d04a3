"""Real Iceberg tables as sources: what expired or was created again is refused, and the output stays as it is."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_ckpt.spark.versions import TableFormat
from tests.support.shop_tables import PLAY_S, play
from tests.support.table_jars import fetch_jars, needs_jar

pytestmark = [pytest.mark.spark, pytest.mark.timeout(PLAY_S), needs_jar(TableFormat.ICEBERG)]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sources")
    fetch_jars(TableFormat.ICEBERG, folder / "jars")
    return play("tests.recovery.table_sources_program", folder / "streams", folder / "jars")


@pytest.mark.thorough(sample="tests/recovery/test_source_check.py")
@pytest.mark.parametrize(
    ("scenario", "error", "why", "rows"),
    [
        ("created again", "SourceChangedError", "another table: its id was", [1, 2]),
        ("expired", "InputGoneError", "no longer exists (expire_snapshots)", [1, 2, 3, 4]),
        ("expired after an empty batch", "InputGoneError", "from its first snapshot on, which no longer exists", []),
    ],
)
def test_a_table_without_what_is_read_next_is_refused(
    told: dict[str, dict[str, Any]], scenario: str, error: str, why: str, rows: list[int]
) -> None:
    found = told[scenario]

    assert found["refused"].startswith(f"{error}: ")
    assert why in found["refused"]
    assert "nothing was changed" in found["refused"]
    assert found["rows"] == rows


@pytest.mark.thorough(sample="tests/recovery/test_source_check.py")
def test_a_table_that_has_its_snapshots_is_read_again(told: dict[str, dict[str, Any]]) -> None:
    assert (told["kept"]["refused"], told["kept"]["rows"]) == (None, [1, 2, 3])
