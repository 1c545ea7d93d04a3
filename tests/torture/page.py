# ruff: noqa: E501
"""`docs/evidence/reliability.md`: what was tried, how often, and what did not hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.torture.bucket import ObjectFault
from tests.torture.faults import CatalogFault, FileFault, LeaseFault
from tests.torture.trial import EVERY_CALL, Outcome

PAGE = Path(__file__).parents[2] / "docs/evidence/reliability.md"

_HEAD = """# Reliability: what was broken, and what held

Written by `make torture`; a slice of it runs with `make test`.

Each operation below runs again and again, each time in a new process, and each time another of its calls fails: a call
that changes a local disk (open, write, flush, rename, link, delete, ...), a request to an object store (without rename
or folders, holding snapshots, live directories and the sink's output), or a transaction with the catalog (SQLite). Only
the fault is simulated; the test writes Spark's files itself, so no JVM is started. After each fault:

- the next plain start recovers without a person, at a correct batch, in a complete live directory, byte for byte; it
  never starts empty, and a second recovery finds nothing to do;
- the sink's log has exactly the rows of an uninterrupted run up to the batch of the query, each file once;
- every listed snapshot passes verification of every byte, before and after housekeeping, and storage and catalog list
  the same snapshots;
- a checkpoint that was listed before is still listed, or a newer one is; so is a savepoint, unless the operation was to
  delete it;
- housekeeping leaves nothing half deleted or in progress;
- other files in these folders, and the files and catalog rows of another stream, are unchanged;
- a failed operation raised an error of this package;
- if the process was killed or an answer was lost, repeating the operation succeeds, and all of this holds again.

Where the lease is lost, a successor takes it before the step, starts from the latest state, commits three batches, and
takes a checkpoint. Then the old process continues to its end. The catalog, the successor's live directory and its sink
are then unchanged, byte for byte, its snapshots pass verification, and its next start resumes after its last batch.

The tables count the points tried; violations, where there are any, follow after a slash.

"""
_TAIL = """
## Reproduce

```console
$ make torture                                  # all of it; rewrites this page
$ .venv/bin/python -m tests.torture --only 'fork' --fault POWER_SOME    # one operation, one fault
```

The number after a point in a message is the call: add `--first 17 --at-most 1` for that one alone. A run ends after 19.5
minutes. Run it again to continue, until the package or the torture changes; three runs on two cores try everything. The
order is drawn from the day; `--seed` repeats a run.

## Tried elsewhere

"""

_ELSEWHERE = {
    "tests/stream/test_lease_lost_at_every_step.py": "the lease is lost by a process that is frozen (SIGSTOP), by a stalled connection, and in PostgreSQL",
    "tests/storage/test_store_crashes.py": "kills and errors at each call of a store of snapshots",
    "tests/client/test_upgrade_crashes.py": "an upgrade that dies at each of its steps",
    "tests/fuzz": "crafted and damaged bytes for every reader (`make fuzz`)",
    "tests/soak": "random kills of real Spark queries, compared row for row (`make soak`)",
    "tests/chaos": "damage of every file, wrong code and moved inputs, at random, compared row for row (`make chaos`)",
}
_KINDS: dict[str, type[FileFault] | type[CatalogFault] | type[ObjectFault] | type[LeaseFault]] = {
    "File calls": FileFault,
    "Catalog calls": CatalogFault,
    "Requests to an object store": ObjectFault,
    "The lease, before each file call and each transaction": LeaseFault,
}


@dataclass(frozen=True)
class Run:
    """One run, or several that went on from each other.

    Attributes:
        outcomes: What came of each operation and fault.
        seconds: How long it took, all runs together.
        runs: How many they were.
        processes: On how many processes.
        seed: Of the order of the last one.
        step: Every so many calls were tried.
        at_most: So many calls of an operation and a fault at most.
    """

    outcomes: Sequence[Outcome]
    seconds: float
    runs: int
    processes: int
    seed: int
    step: int
    at_most: int


def written(run: Run) -> str:
    """The page."""
    few = f", {run.at_most} at most" if run.at_most < EVERY_CALL else ""
    is_all = run.step == 1 and not few
    tried = "every call" if is_all else f"a sample, every {run.step}th call{few}; `make torture` tries every one"
    points = sum(outcome.points for outcome in run.outcomes)
    bad = [outcome for outcome in run.outcomes if outcome.violations]
    cut = [outcome for outcome in run.outcomes if outcome.is_cut]
    together = f" ({run.runs} runs)" if run.runs > 1 else ""
    page = (
        _HEAD
        + f"**{points:,} faults in {run.seconds / 60:.0f} minutes{together} on {run.processes} processes; {sum(len(each.violations) for each in bad)} violations.** "
        + f"Tried: {tried}{', but for what time did not allow (below)' if cut else ''}. Seed of the order: {run.seed}.\n\n"
        + "".join(_table(title, run.outcomes, faults) for title, faults in _KINDS.items())
        + _violated(bad)
        + _left_out(cut)
        + _TAIL
        + _elsewhere()
    )
    return re.sub(r"\n{3,}", "\n\n", page)


def _left_out(cut: Sequence[Outcome]) -> str:
    if not cut:
        return ""
    lines = ["## What was left out", "", "Time was up; the calls after those counted above (`…`) were not tried:", ""]
    lines += [f"- {outcome.scenario}, {type(outcome.fault).__name__} {outcome.fault.name}" for outcome in cut]
    return "\n".join([*lines, "", ""])


def _elsewhere() -> str:
    rows = [f"| {what} | `{path}` |" for path, what in _ELSEWHERE.items() if (PAGE.parents[1] / path).exists()]
    return "\n".join(["| what | where |", "|---|---|", *rows, ""])


def _table(
    title: str,
    outcomes: Sequence[Outcome],
    faults: type[FileFault] | type[CatalogFault] | type[ObjectFault] | type[LeaseFault],
) -> str:
    lines = [f"## {title}", ""]
    lines += [f"- {fault.name}: {fault.value}" for fault in faults]
    columns = " | ".join(fault.name for fault in faults)
    lines += ["", f"| operation | calls | {columns} |", "|---|---:|" + "---:|" * len(faults)]
    for name in dict.fromkeys(outcome.scenario for outcome in outcomes if isinstance(outcome.fault, faults)):
        of_fault = {outcome.fault: outcome for outcome in outcomes if outcome.scenario == name}
        cells = [_cell(of_fault.get(fault)) for fault in faults]
        calls = max((of_fault[fault].calls for fault in faults if fault in of_fault), default=0)
        lines.append(f"| {name} | {calls} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", ""])


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    points = f"{outcome.points or ''}…" if outcome.is_cut else str(outcome.points)
    return f"{points} / **{len(outcome.violations)}**" if outcome.violations else points


def _violated(bad: Sequence[Outcome]) -> str:
    if not bad:
        return ""
    lines = ["## What did not hold", ""]
    for outcome in bad:
        first = outcome.violations[0].replace("\n", " ")[:300]
        lines.append(f"- {outcome.scenario}, {outcome.fault.name}: {len(outcome.violations)}; the first: {first}")
    return "\n".join([*lines, "", ""])
