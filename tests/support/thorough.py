"""The split of the tests: `make test` runs the quick ones, `make test-all` the thorough ones too.

Quick is at least one sample of each promise. Thorough is what proves the same again: on other backends, sinks, storages
and databases, at more steps, with more input. Three marks say which is which, where the test is:

    @pytest.mark.thorough                            # all of a test
    @pytest.mark.thorough(but="heap")                # all but these of its parameters: their id, or a pattern of it
    @pytest.mark.thorough(but=("append-*", "heap"))
    @pytest.mark.thorough(sample="tests/recovery/test_adopt.py")   # the only test of its file; another has the sample

and `either(quick=15, thorough=3)` is a number that differs, such as the stride of a loop. A test that is named
(`pytest file.py::test`) runs, and in full. `python -m tests.support.thorough` prints what `make test` leaves out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

import pytest

PROBLEMS = pytest.StashKey[list[str]]()
Value = TypeVar("Value")
_VARIABLE = "DAGSTER_CKPT_THOROUGH"


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="the thorough tests too: make test-all")


def configure(config: pytest.Config) -> None:
    # Workers and the programs that tests start inherit it.
    if is_on(config):
        os.environ[_VARIABLE] = "1"


def either(*, quick: Value, thorough: Value) -> Value:
    """What a test does in `make test`, or in `make test-all`."""
    return thorough if os.environ.get(_VARIABLE) else quick


def is_on(config: pytest.Config) -> bool:
    """Whether the thorough tests run too."""
    return bool(config.getoption("--thorough")) or _is_named(config)


def _is_named(config: pytest.Config) -> bool:
    return any("::" in argument for argument in config.args)


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the thorough tests, unless they are asked for."""
    thorough = {item for item in items if _is_thorough(item)}
    config.stash[PROBLEMS] = []
    if not _is_named(config):
        config.stash[PROBLEMS] += [*_files_without_a_sample(items, thorough), *_idle_patterns(items)]
    if thorough and not is_on(config):
        config.hook.pytest_deselected(items=[item for item in items if item in thorough])
        items[:] = [item for item in items if item not in thorough]


def _is_thorough(item: pytest.Item) -> bool:
    marks = list(item.iter_markers("thorough"))
    return bool(marks) and not any(_is_sample(item, pattern) for mark in marks for pattern in _but(mark))


def _but(mark: pytest.Mark) -> tuple[str, ...]:
    but = mark.kwargs.get("but", ())
    return (but,) if isinstance(but, str) else tuple(but)


def _is_sample(item: pytest.Item, pattern: str) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and fnmatchcase(callspec.id, pattern)


def _files_without_a_sample(items: list[pytest.Item], thorough: set[pytest.Item]) -> Iterator[str]:
    quick = {item.path for item in items if item not in thorough}
    for path in sorted({item.path for item in thorough if not _sample_elsewhere(item, quick)} - quick):
        yield f"{path}: every test is thorough; keep one sample in `make test`"


def _sample_elsewhere(item: pytest.Item, quick: set[Path]) -> bool:
    samples = [mark.kwargs["sample"] for mark in item.iter_markers("thorough") if "sample" in mark.kwargs]
    return any(item.config.rootpath / sample in quick for sample in samples)


def _idle_patterns(items: list[pytest.Item]) -> Iterator[str]:
    """Patterns that no parameter matches any more: their test would run in `make test-all` only."""
    used: dict[tuple[str, str], bool] = defaultdict(bool)
    for item in items:
        for mark in item.iter_markers("thorough"):
            for pattern in _but(mark):
                used[item.nodeid.partition("[")[0], pattern] |= _is_sample(item, pattern)
    for (test, pattern), is_used in used.items():
        if not is_used:
            yield f"{test}: no parameter is {pattern!r}"


def main() -> None:
    """Print how many tests of each file only `make test-all` runs."""
    quick, both = (_collected(*arguments) for arguments in ((), ("--thorough",)))
    for file, number in both.items():
        if number != quick[file]:
            print(f"{number - quick[file]:5} of {number:5}  {file}")
    print(f"{both.total() - quick.total():5} of {both.total():5}  in all")


def _collected(*arguments: str) -> Counter[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Counter(line.partition("::")[0] for line in printed.splitlines() if "::" in line)


if __name__ == "__main__":
    main()
