"""One operation and one fault, at call after call; and what has to hold after each."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, NullPool, Select, create_engine, select

from dagster_ckpt.catalog.tables import snapshots, streams
from dagster_ckpt.errors import CkptError
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.lost_power import Scenario
from tests.support.places import SCHEME, catalog_at, place
from tests.support.power_loss import Disk, Ran, Trouble
from tests.torture import bucket, leases
from tests.torture.bucket import ObjectFault
from tests.torture.faults import CatalogFault, Fault, FileFault, LeaseFault, ServerFault, run_into
from tests.torture.scenarios import DELETES_ALL, DELETES_SAVEPOINTS, SCENARIOS

EVERY_CALL = 10_000
_NEVER = 10**9
_OTHER = "other"
# So few calls are tried faster than all that they need is compiled and imported before.
_FEW = 5
# Other streams, other people's files: nothing of it is ever touched.
_FOREIGN = (
    "snapshots/other/chk-1/_metadata",
    "snapshots/other/shared/1-a.pack",
    "live/other/live-1/commits/3",
    "elsewhere/part-0",
)
# Here what Spark does is played as well, and it says what fails in its own words.
_PLAYS_SPARK = "checkpoint of what is not flushed"
_TWICE = {
    *(FileFault.KILLED, FileFault.ANSWER_LOST),
    *(CatalogFault.KILLED, CatalogFault.ANSWER_LOST),
    *(ObjectFault.KILLED, ObjectFault.ANSWER_LOST),
    *ServerFault,
}


@dataclass
class Outcome:
    """What came of an operation and a fault.

    Attributes:
        scenario: The operation.
        fault: The fault.
        calls: Calls that the operation makes without a fault.
        points: Calls at which the fault was tried.
        violations: What did not hold, and where.
        is_cut: Time was up before all calls were tried.
    """

    scenario: str
    fault: Fault
    calls: int = 0
    points: int = 0
    violations: list[str] = field(default_factory=list)
    is_cut: bool = False


@dataclass(frozen=True)
class Calls:
    """At which calls a fault is tried.

    Attributes:
        first: The first of them; 1 is the first that there is.
        step: How many calls later the next one is.
        at_most: How many at most.
        until: When to stop, by the monotonic clock.
    """

    first: int = 1
    step: int = 1
    at_most: int = EVERY_CALL
    until: float = math.inf

    def tried(self, outcome: Outcome) -> Iterator[int]:
        """One after the other, for as long as there is time."""
        for call in range(self.first, self.first + self.step * self.at_most, self.step):
            if time.monotonic() > self.until:
                outcome.is_cut = True
                return
            yield call


def torture(name: str, fault: Fault, calls: Calls = Calls()) -> Outcome:
    """Do an operation again and again, with the fault some calls later each time, until it is not met any more."""
    outcome = Outcome(name, fault, is_cut=time.monotonic() > calls.until)
    if outcome.is_cut:
        return outcome
    if isinstance(fault, LeaseFault):
        _lose_lease(outcome, fault, calls)
        return outcome
    with _in_place(fault), new_disk() as disk:
        _torture(disk, SCENARIOS[name], outcome, fault, calls)
    return outcome


def _lose_lease(outcome: Outcome, fault: LeaseFault, calls: Calls) -> None:
    name = outcome.scenario
    with new_disk() as disk:
        leases.make(name, disk.root)
        disk.freeze()
        for call in calls.tried(outcome):
            ran = leases.lose(name, disk, fault, call)
            outcome.calls = max(outcome.calls, len(ran.calls))
            if ran.error is not None:
                outcome.violations.append(f"step {call}: {type(ran.error).__name__}: {ran.error}")
            if not ran.reached:
                break
            outcome.points += 1


@contextmanager
def _in_place(fault: Fault) -> Iterator[None]:
    """Let the stream have its files where the fault happens."""
    before = SCHEME.set(bucket.SCHEME if isinstance(fault, ObjectFault) else SCHEME.get())
    try:
        yield
    finally:
        SCHEME.reset(before)


@dataclass(frozen=True)
class Before:
    """What the catalog said before the fault: snapshots that somebody was promised, and rows of another stream."""

    snapshots: list[tuple[Any, ...]]
    foreign_rows: list[tuple[Any, ...]]


def make(disk: Disk, scenario: Scenario) -> Before:
    """What an operation finds, and what it must not touch."""
    scenario.make(disk.root)
    for name in _FOREIGN:
        path = disk.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not ours")
    _add_foreign_rows(disk)
    return Before(_snapshots(disk, "COMPLETED"), _foreign_rows(disk))


def _torture(
    disk: Disk, scenario: Scenario, outcome: Outcome, fault: FileFault | ObjectFault | CatalogFault, calls: Calls
) -> None:
    before = make(disk, scenario)
    disk.freeze()
    if calls.at_most > _FEW:
        # What is compiled and imported here is there in each child.
        scenario.work(disk.root)
        _problems(scenario, disk)
    for call in calls.tried(outcome):
        ran = run_into(disk, lambda: scenario.work(disk.root), fault, call)
        outcome.calls = max(outcome.calls, len(ran.calls))
        found = violations(scenario, disk, ran, fault, before)
        outcome.violations += [f"call {call} ({ran.calls[-1] if ran.calls else ''}): {each}" for each in found]
        if not ran.reached:
            break
        outcome.points += 1


def violations(scenario: Scenario, disk: Disk, ran: Ran, fault: Fault, before: Before) -> Iterator[str]:
    """What does not hold after an operation and a fault."""
    is_ours = scenario.name != _PLAYS_SPARK
    if ran.error is not None and not isinstance(ran.error, CkptError) and is_ours:
        yield f"{type(ran.error).__name__} came out of it: {ran.error}"
    if not ran.reached and ran.error is not None:
        yield f"without a fault it fails: {ran.error}"
    yield from _problems(scenario, disk)
    yield from _left_over(disk)
    yield from _lost(scenario, disk, before)
    if fault in _TWICE:
        # By a process that meets no fault.
        again = disk.run(lambda: scenario.work(disk.root), Trouble(_NEVER))
        if again.error is not None and not isinstance(again.error, CkptError) and is_ours:
            yield f"done once more, {type(again.error).__name__} came out of it: {again.error}"
        yield from (f"done once more: {each}" for each in _problems(scenario, disk))
        yield from (f"done once more: {each}" for each in _lost(scenario, disk, before))


def _problems(scenario: Scenario, disk: Disk) -> list[str]:
    try:
        return scenario.problems(disk.root)
    except Exception as error:  # noqa: BLE001 - the next process fails, which is what is looked for
        return [f"what comes next fails: {type(error).__name__}: {error}"]


def _left_over(disk: Disk) -> Iterator[str]:
    """What nobody would ever look at again, and what was never ours."""
    for status in ("DELETING", "IN_PROGRESS"):
        if _snapshots(disk, status):
            yield f"after housekeeping a snapshot is still {status}"
    for name in _FOREIGN:
        path = disk.root / name
        if not path.is_file() or path.read_text() != "not ours":
            yield f"{name}, which is not ours, was touched"


def _lost(scenario: Scenario, disk: Disk, before: Before) -> Iterator[str]:
    """What was promised before the fault, and is not kept; rows of the catalog that belong to another stream."""
    if _foreign_rows(disk) != before.foreign_rows:
        yield "rows of another stream were changed in the catalog"
    if scenario.name in DELETES_ALL:
        return
    left = _snapshots(disk, "COMPLETED")
    newest = max((number for _, kind, number in left if kind == "CHECKPOINT"), default=-1)
    for snapshot_id, kind, number in before.snapshots:
        is_listed = any(snapshot_id == each for each, _, _ in left)
        if kind == "SAVEPOINT" and not is_listed and scenario.name not in DELETES_SAVEPOINTS:
            yield f"savepoint {number} is not listed any more"
        if kind == "CHECKPOINT" and not is_listed and newest <= number:
            yield f"checkpoint {number} is not listed any more, and no newer one is"


def _snapshots(disk: Disk, status: str) -> list[tuple[Any, ...]]:
    columns = snapshots.c.snapshot_id, snapshots.c.kind, snapshots.c.number
    return _rows(disk, select(*columns).where(snapshots.c.stream_id != _OTHER, snapshots.c.status == status))


def _add_foreign_rows(disk: Disk) -> None:
    """Another stream and a checkpoint of it, in the same catalog."""
    with _catalog(disk) as catalog:
        values = dict(catalog.execute(select(streams).limit(1)).mappings().one())
        values |= dict.fromkeys(("stream_id", "name", "asset_key"), _OTHER)
        values["live_directory"] = f"{disk.root}/live/other/live-1"
        catalog.execute(streams.insert().values(**values))
        catalog.execute(
            snapshots.insert().values(
                snapshot_id="of-another",
                stream_id=_OTHER,
                kind=SnapshotKind.CHECKPOINT,
                number=1,
                status="COMPLETED",
                trigger="PERIODIC",
                timeline=1,
                location=f"{place(disk.root)}/snapshots/other/chk-1",
                properties="{}",
                created_at_ms=1,
            )
        )
        catalog.commit()


def _foreign_rows(disk: Disk) -> list[tuple[Any, ...]]:
    tables = streams, snapshots
    return [row for table in tables for row in _rows(disk, select(table).where(table.c.stream_id == _OTHER))]


def _rows(disk: Disk, query: Select[Any]) -> list[tuple[Any, ...]]:
    with _catalog(disk) as catalog:
        return [tuple(row) for row in catalog.execute(query)]


@contextmanager
def _catalog(disk: Disk) -> Iterator[Connection]:
    """The catalog, past everything of ours that is under torture."""
    with _engine(catalog_at(disk.root)).connect() as connection:
        yield connection


@lru_cache(maxsize=4)
def _engine(url: str) -> Engine:
    return create_engine(url, poolclass=NullPool)


@contextmanager
def new_disk() -> Iterator[Disk]:
    """An empty one."""
    # Thousands of disks: what is under test is not how fast one flushes.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=memory))
    try:
        disk = Disk(folder / "disk")
        disk.root.mkdir()
        yield disk
    finally:
        shutil.rmtree(folder)
