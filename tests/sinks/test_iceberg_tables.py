"""Real Iceberg tables in real catalogs: a stream that goes back, is killed or loses its files shows each row once."""

from __future__ import annotations

import pytest

from dagster_ckpt.spark.versions import TableFormat
from tests.support.shop_tables import PLAY_S, Plays
from tests.support.table_jars import fetch_jars, needs_jar

SHOWN = {
    "lost directory": range(6),
    "replayed": range(7),
    "lost directory, to a table": range(6),
    "lost directory, by REST": range(6),
    "lost directory, by its folder": range(6),
    "back and forth": range(5),
    "from nothing": range(3),
    "from nothing, by REST": range(3),
    "in flight": range(4),
    "killed before the roll-back": range(3),
    "killed after the roll-back": range(3),
    "compacted": range(3),
    "left to a person": range(3),
    "paused, and the successor goes on": range(3),
    "paused, and the successor goes back": range(4),
    "paused, and the successor goes on, by REST": range(3),
    "paused, and the successor goes back, by REST": range(4),
}

REFUSALS = {
    "others wrote": "To undo theirs as well, run: CALL lake.system.set_current_snapshot(",
    "expired": "older snapshots have expired",
    "expired, and kept by a branch": "DROP BRANCH `backup`",
}
# What the table then shows: that of the start before, and rows of others.
SHOWN_STILL = {
    "others wrote": [0, 1, 2, 100],
    "expired": [0, 1, 2],
    "expired, and kept by a branch": [0, 100, 101],
}
QUICK = (
    "lost directory, to a table",
    "killed after the roll-back",
    "paused, and the successor goes back, by REST",
    "others wrote",
    "debugged",
)

pytestmark = [pytest.mark.spark, pytest.mark.timeout(PLAY_S), needs_jar(TableFormat.ICEBERG)]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Plays:
    """What each scenario of the program has left in its table."""
    folder = tmp_path_factory.mktemp("iceberg")
    fetch_jars(TableFormat.ICEBERG, folder / "jars")
    return Plays("tests.sinks.iceberg_program", folder, QUICK)


@pytest.mark.thorough(but=("lost directory, to a table", "killed after the roll-back", "*goes back, by REST"))
@pytest.mark.parametrize("scenario", SHOWN)
def test_a_stream_into_an_iceberg_table_shows_each_row_once_wherever_it_goes_back_to(
    told: Plays, scenario: str
) -> None:
    assert (told[scenario]["rows"], told[scenario]["refused"]) == (list(SHOWN[scenario]), None)


@pytest.mark.thorough(but="others wrote")
@pytest.mark.parametrize("scenario", REFUSALS)
def test_what_cannot_be_undone_exactly_is_refused_and_nothing_is_lost(told: Plays, scenario: str) -> None:
    shown = told[scenario]

    assert REFUSALS[scenario] in shown["refused"]
    assert shown["rows"] == SHOWN_STILL[scenario]


@pytest.mark.thorough(but="lost directory, to a table*")
@pytest.mark.parametrize(
    ("scenario", "name"),
    [
        ("lost directory", "IcebergTable[lake.db.lost_directory at "),
        ("lost directory, to a table", "IcebergTable[books.db.lost_directory_to_a_table at "),
    ],
)
def test_a_table_of_a_catalog_is_known_as_what_it_is(told: Plays, scenario: str, name: str) -> None:
    assert told[scenario]["sink"].startswith(name)
    assert told[scenario]["guarantees"] == ["EXACTLY_ONCE"]


def test_a_batch_is_compared_with_its_snapshot(told: Plays) -> None:
    assert (told["debugged"]["rows"], told["debugged"]["refused"]) == ([0, 1, 2], None)
