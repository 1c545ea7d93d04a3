"""A table that was dropped, made again, restored, or that another stream wrote: refused, and the advice ends well."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.spark.versions import TableFormat
from tests.support.shop_tables import PLAY_S, play
from tests.support.table_jars import fetch_jars, needs_jar
from tests.support.thorough import either

pytestmark = [pytest.mark.spark, pytest.mark.timeout(PLAY_S)]

OTHER_ID = (
    r"another id: was [0-9a-f-]{36}, is [0-9a-f-]{36}\. It was dropped and created again: batches 0 to 2 of this stream"
)
# By scenario: what the refusal says, and the rows after the way on that it names.
BOTH: dict[str, tuple[str, list[int]]] = {
    "put back": (OTHER_ID, [0, 1, 2, 3]),
    "written again": (OTHER_ID, [0, 1, 2, 3, 4]),
    "gone": ("no longer exists; it had batches up to 2", [0, 1, 2, 3, 4]),
    "accepted": (OTHER_ID, [3]),
    "older copy": ("batches 2 to 3 of this stream are not in it.*from a snapshot of batch 1 or before", [0, 1, 2, 3]),
    "of today": ("batches 0 to 2 of this stream are not in it", [0, 1, 2]),
    "renamed": ("Stream 'shops' of this catalog wrote to .* set stream_id='shops'", [0, 1, 2, 3]),
    "beside another": ("SharedSinkError.*start this one once with accept_loss", [0, 0, 1, 1, 2]),
}
DELTA = {
    **BOTH,
    "emptied": ("not refused", [2, 3]),
    "running": ("another id: was .* dropped and created again", [2, 3]),
    "restored by others": ("batch 3 of this stream is not in it", [0, 1, 2, 3]),
}
ICEBERG = {
    **BOTH,
    "replaced in SQL": ("batches 0 to 2 of this stream are not in it", [0, 1, 2]),
    "expired": ("not refused", [0, 1, 2, 3, 100]),
}
QUICK = {"put back", "accepted"}


@pytest.fixture(scope="module", params=[pytest.param(each, marks=needs_jar(each)) for each in TableFormat])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TableFormat, Any]:
    """The table format, and what each scenario of the program told."""
    table: TableFormat = request.param
    folder: Path = tmp_path_factory.mktemp(table.name.lower())
    fetch_jars(table, folder / "jars")
    kind = table.name.lower()
    only = either(quick=sorted(QUICK), thorough=[])
    return table, play("tests.sinks.replaced_program", folder / "streams", folder / "jars", kind, *only)


@pytest.mark.thorough(but="iceberg")
def test_each_start_that_would_lose_or_double_rows_is_refused_and_its_advice_ends_with_the_right_rows(
    played: tuple[TableFormat, Any],
) -> None:
    table, told = played
    of_format = DELTA if table is TableFormat.DELTA else ICEBERG
    expected = {name: of_format[name] for name in of_format if name in either(quick=QUICK, thorough=of_format)}

    assert {name: each["failed"] for name, each in told.items()} == dict.fromkeys(expected)
    assert {name: each["rows"] for name, each in told.items()} == {name: rows for name, (_, rows) in expected.items()}
    for name, (message, _) in expected.items():
        assert re.search(message, told[name]["told"][0]), (name, told[name]["told"][0])
    # A refused start changes nothing, so the next one is refused in the same words.
    assert told["put back"]["told"][0] == told["put back"]["told"][1]
    assert "was dropped and created again. Put the table back" in told["accepted"]["told"][1]
