"""docs/flink-rules.md is true as far as a test can tell: what it names exists, and it hides no difference."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "flink-rules.md"
NOT_HERE = "not here: "
DIFFERS = "**differs:** "


def rows() -> list[list[str]]:
    """Rule, what happens here, and the tests, of each row of the page."""
    lines = (line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| "))
    cells = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines)
    return [row for row in cells if row[0] != "Flink"]


def cases() -> Iterator[dict[str, Any]]:
    for file in sorted(TESTS.rglob("*.yaml")):
        listed = yaml.safe_load(file.read_text(encoding="utf-8"))
        yield from (case for case in listed if isinstance(case, dict)) if isinstance(listed, list) else ()


@cache
def names() -> frozenset[str]:
    """Every test, and every case of the YAML files."""
    tests = (
        re.findall(r"(?:def |^)([tT]est\w+)", file.read_text(encoding="utf-8"), re.M) for file in TESTS.rglob("*.py")
    )
    told = (case.get("name") or case.get("says") for case in cases())
    return frozenset([*(name for found in tests for name in found), *(str(words) for words in told if words)])


def test_every_test_that_the_page_names_exists() -> None:
    named = [name for row in rows() for name in re.findall(r"`([^`]+)`", row[2])]

    assert len(named) > len(rows())
    assert [name for name in named if name not in names()] == []


def test_every_rule_has_a_test_or_says_why_it_has_no_place_here() -> None:
    assert len(rows()) > 50
    assert [row[0] for row in rows() if len(row) != 3] == []
    assert [row[0] for row in rows() if (row[2] == "—") is not row[1].startswith(NOT_HERE)] == []


def test_the_differences_of_the_page_are_those_that_cases_show() -> None:
    shown = {str(case.get("name") or case["says"]): case["unlike_flink"] for case in cases() if "unlike_flink" in case}
    told = [(row[1].removeprefix(DIFFERS), row[2]) for row in rows() if row[1].startswith(DIFFERS)]

    assert len(told) == len(shown)
    for name, reason in shown.items():
        assert any(here.startswith(reason) and f"`{name}`" in tests for here, tests in told), name
