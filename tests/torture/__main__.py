"""`make torture`: every operation, every fault, every call; the outcome is `docs/reliability.md`."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time

import tests.torture.paths  # noqa: F401 - first
from tests.torture import leases
from tests.torture.bucket import ObjectFault
from tests.torture.faults import CatalogFault, Fault, FileFault, LeaseFault
from tests.torture.page import PAGE, written
from tests.torture.scenarios import SCENARIOS
from tests.torture.trial import Outcome, torture


def _one(task: tuple[str, Fault, int]) -> Outcome:
    name, fault, step = task
    return torture(name, fault, step=step)


# What is done, and what happens meanwhile.
TASKS = [
    *itertools.product(SCENARIOS, (*FileFault, *CatalogFault, *ObjectFault)),
    *itertools.product(leases.CASES, LeaseFault),
]


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[*SCENARIOS, *leases.CASES], help="one operation; the page is not written")
    parser.add_argument("--fault", choices=sorted({fault.name for _, fault in TASKS}))
    parser.add_argument("--step", type=int, default=1, help="only every so many calls")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    tasks = [
        (name, fault, asked.step)
        for name, fault in TASKS
        if asked.only in (None, name) and asked.fault in (None, fault.name)
    ]
    began = time.monotonic()
    outcomes = []
    with multiprocessing.get_context("fork").Pool(asked.processes) as pool:
        for outcome in pool.imap(_one, tasks):
            outcomes.append(outcome)
            print(f"{outcome.scenario:45} {outcome.fault.name:14} {outcome.points:4} points", flush=True)
            for violation in outcome.violations[:3]:
                print(f"    {violation[:600]}", flush=True)
    if not (asked.only or asked.fault):
        PAGE.write_text(written(outcomes, time.monotonic() - began, asked.step))
    return 1 if any(outcome.violations for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
