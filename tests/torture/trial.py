"""One operation and one fault, at call after call; and what has to hold after each."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lost_power import Scenario

from dagster_ckpt.errors import CkptError
from tests.power_loss import CATALOG, Disk, Ran, Trouble
from tests.torture.faults import CatalogFault, FileFault, run_into
from tests.torture.scenarios import SCENARIOS

Fault = FileFault | CatalogFault
_NEVER = 10**9
# Other streams, other people's files: nothing of it is ever touched.
_FOREIGN = (
    "images/other/chk-1/_metadata",
    "images/other/shared/1-a.pack",
    "live/other/live-1/commits/3",
    "elsewhere/part-0",
)
# Here what Spark does is played as well, and it says what fails in its own words.
_PLAYS_SPARK = "checkpoint of what is not flushed"
_TWICE = {FileFault.KILLED, FileFault.ANSWER_LOST, CatalogFault.KILLED_AFTER, CatalogFault.ANSWER_LOST}


@dataclass
class Outcome:
    """What came of an operation and a fault.

    Attributes:
        scenario: The operation.
        fault: The fault.
        calls: Calls that the operation makes without a fault.
        points: Calls at which the fault was tried.
        violations: What did not hold, and where.
        left_in_progress: After how many faults the catalog had an image in progress that nobody takes any more.
    """

    scenario: str
    fault: Fault
    calls: int = 0
    points: int = 0
    violations: list[str] = field(default_factory=list)
    left_in_progress: int = 0


def torture(scenario_name: str, fault: Fault, *, first: int = 1, step: int = 1, at_most: int = 10_000) -> Outcome:
    """Do an operation again and again, with the fault some calls later each time, until it is not met any more."""
    scenario, outcome = SCENARIOS[scenario_name], Outcome(scenario_name, fault)
    with _disk() as disk:
        scenario.make(disk.root)
        for name in _FOREIGN:
            path = disk.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("not ours")
        disk.freeze()
        call = first
        while outcome.points < at_most:
            ran = run_into(disk, lambda: scenario.work(disk.root), fault, call)
            outcome.calls = max(outcome.calls, len(ran.calls))
            found = _violations(scenario, disk, ran, fault)
            outcome.violations += [f"call {call} ({ran.calls[-1] if ran.calls else ''}): {each}" for each in found]
            outcome.left_in_progress += _images(disk, "IN_PROGRESS") > 0
            if not ran.reached:
                break
            outcome.points += 1
            call += step
    return outcome


def _violations(scenario: Scenario, disk: Disk, ran: Ran, fault: Fault) -> Iterator[str]:
    is_ours = scenario.name != _PLAYS_SPARK
    if ran.error is not None and not isinstance(ran.error, CkptError) and is_ours:
        yield f"{type(ran.error).__name__} came out of it: {ran.error}"
    if not ran.reached and ran.error is not None:
        yield f"without a fault it fails: {ran.error}"
    yield from _problems(scenario, disk)
    yield from _left_over(disk)
    if fault in _TWICE:
        # By a process that meets no fault.
        again = disk.run(lambda: scenario.work(disk.root), Trouble(_NEVER))
        if again.error is not None and not isinstance(again.error, CkptError) and is_ours:
            yield f"done once more, {type(again.error).__name__} came out of it: {again.error}"
        yield from (f"done once more: {each}" for each in _problems(scenario, disk))


def _problems(scenario: Scenario, disk: Disk) -> list[str]:
    try:
        return scenario.problems(disk.root)
    except Exception as error:  # noqa: BLE001 - the next process fails, which is what is looked for
        return [f"what comes next fails: {type(error).__name__}: {error}"]


def _left_over(disk: Disk) -> Iterator[str]:
    """What nobody would ever look at again, and what was never ours."""
    if _images(disk, "DELETING"):
        yield "an image is still half deleted after housekeeping"
    for name in _FOREIGN:
        path = disk.root / name
        if not path.is_file() or path.read_text() != "not ours":
            yield f"{name}, which is not ours, was touched"


def _images(disk: Disk, status: str) -> int:
    with contextlib.closing(sqlite3.connect(disk.root / CATALOG)) as catalog:
        return int(catalog.execute("SELECT count(*) FROM images WHERE status = ?", (status,)).fetchone()[0])


@contextmanager
def _disk() -> Iterator[Disk]:
    # Thousands of disks: what is under test is not how fast one flushes.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=memory))
    try:
        disk = Disk(folder / "disk")
        disk.root.mkdir()
        yield disk
    finally:
        shutil.rmtree(folder)
