"""docs/internals.md describes the code as it is: every package, module and name on the page exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dagster_ckpt"
PAGE = (ROOT / "docs/internals.md").read_text(encoding="utf-8")
MODULES = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:\w+/)*\w+\.(?:py|yaml))`", PAGE))))
def test_a_module_on_the_page_exists(name: str) -> None:
    if "/" in name:
        assert name in MODULES or (ROOT / name).exists()
    else:
        assert name in {path.name for path in MODULES.values()}


def test_every_package_is_in_the_picture() -> None:
    picture = PAGE.partition("```text")[2].partition("```")[0]
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}

    assert packages == {name for name in re.findall(r"(\w+)/ ", picture) if (PACKAGE / name).is_dir()}


def test_each_question_is_answered_by_a_module_that_has_the_name() -> None:
    """The table "Where is ...": a name in its last column is in the module of its row, or in one that the row names."""
    rows = [
        row.split("|")[1:4] for row in PAGE.partition("### Where is")[2].partition("\n## ")[0].splitlines()[4:] if row
    ]
    assert rows
    missing = []
    for question, module, what in rows:
        named = [name for name in re.findall(r"`((?:\w+/)*\w+\.py)`", module + what) if name in MODULES]
        folder = module.strip(" `").rpartition("/")[0]
        named += [f"{folder}/{name}" for name in re.findall(r"`(\w+\.py)`", what)]
        sources = [MODULES[name].read_text(encoding="utf-8") for name in named if name in MODULES]
        # A dotted name says where it is itself: `Database.writing_under`.
        names = list(re.findall(r"`(\w+)`", what))
        missing += [
            f"{question.strip()}: {name}" for name in names if not any(re.search(rf"\b{name}\b", s) for s in sources)
        ]
    assert missing == []
