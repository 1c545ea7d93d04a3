"""Real tables whose stream is killed with SIGKILL, at random and at each step of a roll-back, show each row once."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from dagster_ckpt.spark.versions import TableFormat
from tests.sinks.killed_program import STEPS
from tests.support.shop_tables import play
from tests.support.table_jars import fetch_jars, needs_jar

SEED = int(os.environ.get("TABLES_SEED") or time.time_ns() % 1_000_000)
TIMEOUT_S = 3600

pytestmark = [pytest.mark.spark, pytest.mark.tables, pytest.mark.timeout(TIMEOUT_S)]


@pytest.fixture(scope="module", params=[pytest.param(table, marks=needs_jar(table)) for table in TableFormat], ids=str)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each scenario of the program has left in its table."""
    folder = tmp_path_factory.mktemp(f"killed-{request.param}")
    fetch_jars(request.param, folder / "jars")
    program = "tests.sinks.killed_program"
    return play(program, folder / "streams", folder / "jars", request.param, str(SEED), timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("scenario", ["killed at random", "its directory destroyed", "rewound", "beside its fork"])
def test_a_table_has_the_rows_of_an_uninterrupted_run(told: dict[str, dict[str, Any]], scenario: str) -> None:
    assert told[scenario]["rows"] == list(range(told[scenario]["fed"])), f"seed {SEED}"


def test_a_fork_has_the_rows_after_its_point_once(told: dict[str, dict[str, Any]]) -> None:
    assert told["forked"]["rows"] == list(range(9, told["forked"]["fed"])), f"seed {SEED}"


def test_a_roll_back_that_was_killed_at_any_step_is_finished_by_the_next_start(
    told: dict[str, dict[str, Any]],
) -> None:
    steps = {name: shown["rows"] for name, shown in told.items() if "within_ms" in shown}

    assert len(steps) == len(STEPS)
    assert steps == {step: list(range(5)) for step in steps}, f"seed {SEED}"
