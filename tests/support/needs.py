"""Marks of tests that not every version of Spark can run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest

from dagster_ckpt.spark.versions import Feature, SparkRelease, installed_release, release_of
from dagster_ckpt.state.rewriter import Rewriter
from tests.support import thorough

# As in the Makefile, which runs every test on it.
MAIN_SPARK = "4.1"
Made = TypeVar("Made")
_OF_THE_CORE = re.compile(r"\bmark\.core\b|\bneeds\b|\bby_name\b")


def needs(*features: Feature) -> pytest.MarkDecorator:
    """Skip a test on a Spark without these features, and run it in the core of the others if the main one lacks any."""
    return pytest.mark.needs(*features)


def needs_rewriter(*of_this_spark: Feature) -> pytest.MarkDecorator:
    """Skip a test if neither this Spark has these features (by default: it rewrites state) nor another one is there.

    `make test-state` names the other one.
    """
    return needs() if Rewriter.find() is not None else needs(*of_this_spark or (Feature.STATE_REWRITER,))


def by_name(names: Iterable[str]) -> list[Any]:
    """Parameters that are names of queries, each with its mark if their name says what they need."""
    return [pytest.param(name, marks=needs(*_named(name)), id=name) for name in names]


def runs_here(name: str) -> bool:
    """Whether this Spark can run the query of this name."""
    return _named(name) <= installed_release().features


class OfEach(dict[str, Made]):
    """What was made of each query that this Spark can run; a test that asks for another is skipped."""

    def __missing__(self, name: str) -> NoReturn:
        pytest.skip(f"{installed_release()} has no {', '.join(sorted(_named(name)))}")


def _named(name: str) -> set[Feature]:
    features = {"v2": Feature.CHECKPOINT_FORMAT_2, "join-v3": Feature.JOIN_STATE_3}
    return {feature for part, feature in features.items() if part in name}


def is_without_core(path: Path) -> bool:
    """Whether a file has no test of the core, by its words, so that thousands of others need not be collected."""
    return path.name.startswith("test_") and not _OF_THE_CORE.search(path.read_text(encoding="utf-8"))


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this Spark lacks; with `--spark-core`, keep only the core, and what the main version lacks."""
    core = bool(config.getoption("--spark-core"))
    main = release_of(MAIN_SPARK)
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        needed = {feature for marker in item.iter_markers("needs") for feature in marker.args}
        if needed:
            _skip(item, needed, installed_release())
        belongs = _is_core(item, config) or not needed <= main.features
        (kept if belongs or not core else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def _is_core(item: pytest.Item, config: pytest.Config) -> bool:
    core = item.get_closest_marker("core")
    return core is not None and (not core.kwargs.get("thorough", False) or thorough.is_on(config))


def _skip(item: pytest.Item, needed: set[Feature], release: SparkRelease) -> None:
    lacking = sorted(needed - release.features)
    if lacking:
        item.add_marker(pytest.mark.skip(reason=f"{release} has no {', '.join(lacking)}"))
