"""The table of how a run ends, in docs/recovery.md, names the test of each row, and leaves none out."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "recovery.md").read_text()
TESTS = re.findall(r"^def (test_\w+)\(", (HERE / "test_ways_a_run_ends.py").read_text(), re.MULTILINE)
# What a new daemon reports is no end of a run, nor are the rows, nor what the sensors did all the while.
NOT_AN_END = {
    "test_a_stream_that_died_in_every_way_wrote_the_rows_of_an_uninterrupted_run",
    "test_what_was_reported_before_a_daemon_died_is_not_reported_again",
    "test_no_sensor_of_ours_failed_in_all_of_it",
}


def rows() -> list[list[str]]:
    section = PAGE.split("## How a run ends\n", 1)[1].split("\n## ", 1)[0]
    lines = [line.strip("| ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split(" | ")] for line in lines[2:]]


def test_each_row_names_the_test_that_does_it() -> None:
    named = [re.findall(r"`(test_\w+)`", row[-1]) for row in rows()]

    assert sorted(test for tests in named for test in tests) == sorted(set(TESTS) - NOT_AN_END)
    assert all(len(tests) == 1 for tests in named)


def test_each_row_says_what_is_recorded() -> None:
    assert all(re.match(r"(CANCELED|FAILURE|STARTED|SUCCESS)\b", row[1]) for row in rows())
