"""`make test` has a sample of whatever `make test-all` proves: see support/thorough.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.thorough import PROBLEMS

pytest_plugins = "pytester"

MARKED = """
import pytest

@pytest.mark.thorough
def test_long(): ...

@pytest.mark.thorough(but=("heap-*", "rocksdb-2"))
@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_matrix(backend, partitions): ...
"""
PLUGIN = """
from tests.support import thorough

pytest_configure, pytest_addoption = thorough.configure, thorough.add_option
pytest_collection_modifyitems = thorough.leave_out
"""
QUICK = ["test_matrix[heap-1]", "test_matrix[heap-2]", "test_matrix[rocksdb-2]"]


class Noted:
    """What was left of the tests of a run, and what was wrong with them."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = sorted(item.name for item in session.items)
        self.problems = session.config.stash[PROBLEMS]


@pytest.fixture
def collected(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Noted]:
    # What the run here was started with is no business of the run within.
    monkeypatch.setenv("DAGSTER_CKPT_THOROUGH", "")
    pytester.makeconftest(PLUGIN)
    pytester.makeini("[pytest]\nmarkers = thorough")

    def collect(*arguments: str) -> Noted:
        noted = Noted()
        pytester.inline_run("--collect-only", *arguments, plugins=[noted])
        return noted

    return collect


def test_no_file_is_all_thorough_and_each_sample_exists(request: pytest.FixtureRequest) -> None:
    assert request.config.stash[PROBLEMS] == []


def test_the_index_names_each_helper_once() -> None:
    here = Path(__file__).parent
    modules = {path.stem for path in (here / "support").glob("*.py") if not path.name.startswith("test_")}
    index = re.findall(r"^\| `(\w+)`", (here / "README.md").read_text(), re.MULTILINE)

    assert sorted(index) == sorted(modules)


def test_a_thorough_test_runs_if_it_is_asked_for_or_named(
    pytester: pytest.Pytester, collected: Callable[..., Noted]
) -> None:
    file = pytester.makepyfile(MARKED)

    assert collected().names == QUICK
    assert collected(f"{file}::test_long").names == ["test_long"]
    assert collected("--thorough").names == sorted(["test_long", "test_matrix[rocksdb-1]", *QUICK])


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (MARKED.partition("@pytest.mark.thorough(")[0], "every test is thorough"),
        (MARKED.replace("rocksdb-2", "rocksdb-3"), "no parameter is 'rocksdb-3'"),
    ],
    ids=["no sample", "a sample that is not there"],
)
def test_a_promise_without_a_sample_is_a_problem(
    pytester: pytest.Pytester, collected: Callable[..., Noted], written: str, problem: str
) -> None:
    pytester.makepyfile(written)

    assert [problem in each for each in collected().problems] == [True]
