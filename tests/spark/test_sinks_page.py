"""docs/evidence/coverage.md claims "each row once" of no sink without a test that runs Spark with the real one."""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from dagster_ckpt.sinks.batch_in_flight import can_replay_a_batch
from dagster_ckpt.sinks.registry import forecast
from dagster_ckpt.sinks.sink import Replay, SinkEffect

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs/evidence/coverage.md"
ONCE = {SinkEffect.EXACT, SinkEffect.SKIP}


def rows() -> list[tuple[str, str, set[SinkEffect], list[str]]]:
    """Sink, what Spark calls it, the effects claimed, and the tests, of each row."""
    table = PAGE.read_text(encoding="utf-8").partition("\n## Sinks\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    return [
        (sink, name.strip("`"), {SinkEffect(word) for word in re.findall(r"`([A-Z]+)`", claim)}, _named(shown))
        for sink, name, claim, shown in lines
    ]


def _named(cell: str) -> list[str]:
    return re.findall(r"`(test_\w+)`", cell)


@cache
def files_of_tests() -> dict[str, str]:
    """The source of the file of each test."""
    sources = [path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")]
    return {name: source for source in sources for name in re.findall(r"^def (test_\w+)", source, re.M)}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_each_claim_of_each_row_once_names_a_test_that_runs_spark(
    row: tuple[str, str, set[SinkEffect], list[str]],
) -> None:
    _, _, claims, tests = row

    assert claims
    assert tests or not claims & ONCE
    for test in tests:
        assert "pytest.mark.spark" in files_of_tests()[test], test


def test_no_sink_is_forecast_better_than_its_rows_say() -> None:
    claimed: dict[str, set[SinkEffect]] = {}
    for _, name, claims, _ in rows():
        claimed.setdefault(name, set()).update(claims)
    replays = [
        Replay(to_batch, "a query", keeps_query_id=keeps_id, in_flight=in_flight)
        for to_batch, keeps_id, in_flight in product((-1, 3), (True, False), (None, 4))
    ]

    for name, claims in claimed.items():
        assert {forecast(name, replay).effect for replay in replays} <= claims, name
        assert not can_replay_a_batch([name]) or SinkEffect.SKIP in claims, name
