"""Whatever bytes the readers are given, they end, raise only errors of this package, and agree.

Every input that was found to break that is in `corpus/`, and is tried each time. Besides, some are drawn: a few
hundred by seeds that never change, and by `make fuzz` for as long as is wanted, which keeps what it finds.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from tests.fuzz import catalogs, live_directories, snapshots
from tests.fuzz.case import Case, Target, kept, read

TARGETS = {"snapshots": snapshots.TARGET, "live_directories": live_directories.TARGET, "catalogs": catalogs.TARGET}
DRAWN = {"snapshots": 150, "live_directories": 60, "catalogs": 25}
LONGEST_S = 10
each_target = pytest.mark.parametrize("name", TARGETS)


@contextmanager
def limited(seconds: int = LONGEST_S) -> Iterator[None]:
    """A reader that does not end is interrupted."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tried(name: str, target: Target, case: Case, folder: Path) -> None:
    scratch = folder / "case"
    scratch.mkdir()
    try:
        with limited():
            target.check(case, scratch)
    except BaseException as error:
        error.add_note(f"{name}: {case.where}, {case.data[:200]!r}; case.keep({name!r}) puts it into the corpus")
        raise
    finally:
        shutil.rmtree(scratch)


@pytest.mark.parametrize(("name", "path"), [(name, path) for name in TARGETS for path in kept(name)])
def test_an_input_that_was_found_once_is_read_or_refused(name: str, path: Path, tmp_path: Path) -> None:
    tried(name, TARGETS[name], read(path), tmp_path)


@each_target
def test_inputs_of_a_fixed_seed_are_read_or_refused(name: str, tmp_path: Path) -> None:
    rng = random.Random(f"{name}-1")
    for _ in range(DRAWN[name]):
        tried(name, TARGETS[name], TARGETS[name].draw(rng), tmp_path)


@pytest.mark.fuzz
@each_target
def test_inputs_of_a_new_seed_are_read_or_refused(name: str, tmp_path: Path) -> None:
    seed = os.environ.get("FUZZ_SEED") or str(random.SystemRandom().randrange(10**9))
    print(f"{name}: FUZZ_SEED={seed}")
    rng, count, found = random.Random(f"{name}-{seed}"), 0, dict[str, Path]()
    ends_at = time.monotonic() + 60 * float(os.environ.get("FUZZ_MINUTES", "5")) / len(TARGETS)
    while time.monotonic() < ends_at:
        case = TARGETS[name].draw(rng)
        count += 1
        try:
            tried(name, TARGETS[name], case, tmp_path)
        except Exception as error:  # noqa: BLE001 - what it must not raise is kept
            last = error.__traceback__
            while last is not None and last.tb_next is not None:
                last = last.tb_next
            at = f"{last.tb_frame.f_code.co_filename}:{last.tb_lineno}" if last is not None else ""
            place = f"{type(error).__name__} at {at}"
            if place not in found:
                found[place] = case.keep(name)
                print(f"{place}: {error!s:.200} ({case.where})")
    print(f"{name}: {count} inputs, {len(found)} kinds of failure")
    assert not found
