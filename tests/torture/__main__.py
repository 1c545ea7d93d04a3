"""`make torture`: every operation, every fault, every call; the outcome is `docs/evidence/reliability.md`."""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import random
import sys
import time

from dagster_ckpt.catalog import database
from tests.torture import leases, memory
from tests.torture.bucket import ObjectFault
from tests.torture.faults import CatalogFault, Fault, FileFault, LeaseFault
from tests.torture.page import PAGE, Run, written
from tests.torture.scenarios import SCENARIOS
from tests.torture.trial import EVERY_CALL, Calls, Outcome, torture

# What is done, and what happens meanwhile.
TASKS: list[tuple[str, Fault]] = [
    *itertools.product(SCENARIOS, (*FileFault, *CatalogFault, *ObjectFault)),
    *((name, LeaseFault.LOST) for name in leases.CASES),
    *((name, LeaseFault.LOST_WITHOUT_RENAME) for name, case in leases.CASES.items() if case.beside_disk),
]


def _quickly() -> None:
    """Let a point cost less: thousands of short processes inherit what this one knows."""
    gc.disable()
    # Nothing of a SQLite engine is bound to the process that made it, and it has compiled our statements already.
    make = database._engine
    database._engine = lambda url, _process: make(url, 0)  # type: ignore[assignment]


def _one(task: tuple[str, Fault, Calls]) -> Outcome:
    try:
        return torture(*task)
    finally:
        gc.collect()


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[*SCENARIOS, *leases.CASES], help="one operation; the page is not written")
    parser.add_argument("--fault", choices=sorted({fault.name for _, fault in TASKS}))
    parser.add_argument("--first", type=int, default=1, help="the first call")
    parser.add_argument("--step", type=int, default=1, help="only every so many calls")
    parser.add_argument("--at-most", type=int, default=EVERY_CALL, help="at most so many calls of an operation")
    parser.add_argument("--minutes", type=float, default=19.5, help="what is not tried by then is left out")
    parser.add_argument("--seed", type=int, help="of the order, which decides what is left out; else the day's")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    began = time.monotonic()
    calls = Calls(asked.first, asked.step, asked.at_most, until=began + 60 * asked.minutes)
    tasks = [
        (name, fault, calls)
        for name, fault in TASKS
        if asked.only in (None, name) and asked.fault in (None, fault.name)
    ]
    seed = asked.seed if asked.seed is not None else int(time.time() // 86_400)
    random.Random(seed).shuffle(tasks)
    whole = (asked.only, asked.fault, asked.seed, asked.first, asked.step, asked.at_most)
    is_all = whole == (None, None, None, 1, 1, EVERY_CALL)
    before = memory.recalled() if is_all else memory.Memory()
    if len(before.outcomes) == len(TASKS):
        before = memory.Memory()
    done = {(each.scenario, each.fault) for each in before.outcomes}
    tasks = [task for task in tasks if task[:2] not in done]
    if done:
        print(f"Goes on from earlier runs, which tried {len(done)} of {len(done) + len(tasks)} pairs.", flush=True)
    outcomes = []
    with multiprocessing.get_context("fork").Pool(asked.processes, initializer=_quickly) as pool:
        for outcome in pool.imap_unordered(_one, tasks):
            outcomes.append(outcome)
            print(f"{outcome.scenario:45} {outcome.fault.name:20} {outcome.points:4} points", flush=True)
            for violation in outcome.violations[:3]:
                print(f"    {violation[:600]}", flush=True)
    seconds, runs = before.seconds + time.monotonic() - began, before.runs + 1
    if is_all:
        finished = [each for each in outcomes if not each.is_cut]
        memory.remember(memory.Memory([*before.outcomes, *finished], seconds, runs))
    if not (asked.only or asked.fault):
        outcomes = [*before.outcomes, *outcomes]
        outcomes.sort(key=lambda each: TASKS.index((each.scenario, each.fault)))
        PAGE.write_text(written(Run(outcomes, seconds, runs, asked.processes, seed, asked.step, asked.at_most)))
    return 1 if any(outcome.violations for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
